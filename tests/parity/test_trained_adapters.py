"""What was trained is what is served: the packed pass that it learnt in, the engine and peft agree to 1e-4 in fp32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MakeEngine
from support.adapters import PeftOracle
from support.families import FAMILIES, save_tiny
from support.traces import draw_trace, engine_logits
from support.tuning import Killer, make_tuning
from torch import Tensor

from choreo_agents import Decode, Sampling
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.trace import Trace, record, text_twin
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import EvalScore

TOLERANCE = 1e-4
FREE = Sampling(temperature=1.0, max_tokens=8, stop_tokens=())


def rising(_: Tuned) -> object:
    """Whatever was learnt last is the best."""
    return lambda epoch: EvalScore(float(epoch))


def trained(model: LoadedModel, folder: Path, **changes: object) -> Tuned:
    tuning = make_tuning(model, folder, judge=rising, **changes)  # type: ignore[arg-type]
    tuning.run(Killer())
    tuning.tuned.save(folder / "tuned")
    return tuning.tuned


def packed(tuned: Tuned, traces: list[Trace]) -> Tensor:
    """The logits of the pass that it was trained in, dropout aside."""
    adapters = {}
    if tuned.lora is not None:
        adapters[TUNED] = replace(tuned.lora, dropout=0.0)
    with torch.no_grad():
        return TraceForward(tuned.model, adapters=adapters, mapper=tuned.mapper).logits(traces).logits.float()


def adapted(trace: Trace) -> Trace:
    return Trace(trace.id, tuple(replace(message, adapter=TUNED) for message in trace.messages))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "gemma2"])
def test_an_adapter_has_the_trainers_logits_in_the_engine_and_in_peft(
    make_engine: MakeEngine, tmp_path: Path, family: str
) -> None:
    path = save_tiny(tmp_path / "model", family, FAMILIES[family], seed=3)
    model = load_model(path)
    tuned = trained(model, tmp_path, mapper_rank=0)
    traces = [draw_trace(random.Random(seed), 6, name=str(seed)) for seed in range(3)]
    mine = packed(tuned, [adapted(trace) for trace in traces])
    assert (mine - packed(tuned, traces)).abs().max() > 0.1, "the adapter makes no difference"
    engine = make_engine(model, adapter=tmp_path / "tuned")
    served = torch.cat([engine_logits(engine, trace) for trace in traces])
    assert (mine - served).abs().max() <= TOLERANCE

    twins = [text_twin(trace) for trace in traces]
    oracle = PeftOracle(path, tmp_path / "tuned")
    theirs = []
    for twin in twins:
        for message in twin.messages:
            assert message.learn is not None
            theirs.append(oracle.logits(message.tokens)[message.learn[0] - 1 : message.learn[1] - 1])
    assert (packed(tuned, [adapted(twin) for twin in twins]) - torch.cat(theirs)).abs().max() <= TOLERANCE


def test_adapter_and_mapper_have_the_trainers_logits_in_the_engine(
    tiny: LoadedModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Branches as they are, what the mapper makes of them, and the adapter for what reads these."""
    tuned = trained(tiny, tmp_path)
    engine = make_engine()
    name = engine.load_adapter(tmp_path / "tuned")
    assert name == TUNED
    root = engine.prefill([5, 6, 7])
    branches = engine.decode([Decode([8 + number], [root], sampling=FREE) for number in range(3)])
    seen: list[Tensor] = []
    call = Decode(
        [20, 21],
        [root, *engine.branches.map(branches, name)],
        [0, 3, 3, 3],
        40,
        sampling=FREE,
        adapter=name,
        logits_callback=lambda logits: seen.append(logits.clone()),
    )
    [said] = engine.decode([call])
    trace = record(engine, "merged", [said])
    messages = [replace(m, learn=m.learn if m.name == said.id else None) for m in trace.messages]
    assert sum(message.mapped for message in messages) == 3 and messages[-1].adapter == TUNED
    mine = packed(tuned, [Trace("merged", tuple(messages))])
    assert (mine - torch.stack(seen)).abs().max() <= TOLERANCE
    plain = [replace(m, adapter=None) for m in messages]
    assert (packed(tuned, [Trace("merged", tuple(plain))]) - mine).abs().max() > 0.1


def test_half_precision_trains_an_adapter_in_full_and_serves_it(
    tiny_path: Path, make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = load_model(tiny_path, dtype=torch.bfloat16)
    tuning = make_tuning(model, tmp_path, judge=rising, epochs=6, dropout=0.0, imitation=0.0)  # type: ignore[arg-type]
    assert {tensor.dtype for _, tensor in tuning.tuned.named_parameters()} == {torch.float32}
    tuning.run(Killer())
    losses = [each["loss"] for each in tuning.outcome.history[1:]]
    assert losses[-1] < 0.9 * losses[0]
    tuning.tuned.save(tmp_path / "tuned")
    assert {p.dtype for p in model.adapter.model.parameters()} == {torch.bfloat16}
    trace = draw_trace(random.Random(1), 5)
    engine = make_engine(model, adapter=tmp_path / "tuned")
    mine, served = packed(tuning.tuned, [adapted(trace)]), engine_logits(engine, trace)
    plain = packed(tuning.tuned, [trace])
    assert (mine - served).abs().mean() < 0.2 * (mine - plain).abs().mean(), "rounding apart, it is the same adapter"
