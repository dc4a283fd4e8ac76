"""A recorded run is a trace that says what the engine did: the packed pass over it gives the engine's logits."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.graphs import QUESTION
from support.traces import draw_adapter, draw_mapper, draw_trace, engine_handles
from torch import Tensor

from choreo_agents import Decode, Engine, MessageHandle, Prefill, RunOptions, Sampling
from choreo_agents.errors import HandleError
from choreo_agents.models import LoadedModel
from choreo_agents.models.adapter_files import write_adapter
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.trace import Trace, handles_in, record, text_twin
from choreo_agents.workflows.graphs.debate import debate

FREE = Sampling(temperature=1.0, max_tokens=9, stop_tokens=())


class Watched:
    """The logits of each decode of a graph's run, by (author, superstep, branch, call)."""

    def __init__(self) -> None:
        self.logits: defaultdict[Any, list[Tensor]] = defaultdict(list)

    def __call__(self, *place: Any) -> Callable[[Tensor], None]:
        return lambda logits: self.logits[place].append(logits.detach().clone())


def require_same_logits(trace: Trace, model: LoadedModel, wanted: dict[str, Tensor], **options: Any) -> None:
    """Of each learnt message, by name, those that the engine sampled from."""
    learnt = [message for message in trace.messages if message.learn is not None]
    assert {message.name for message in learnt} == wanted.keys()
    with torch.no_grad():
        packed = TraceForward(model, **options).logits([trace]).logits
    error = (packed - torch.cat([wanted[message.name] for message in learnt])).abs().max().item()
    assert error <= 1e-4, f"logits differ by {error}"


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_a_recorded_debate_has_the_engines_logits(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method)
    graph = debate({"ann": "Ann has 3 kites.", "bo": None}, rounds=2, system="Talk.", revise="Again.", sampling=FREE)
    seen = Watched()
    state = graph.compile(engine=engine).invoke(
        QUESTION, {"configurable": {"choreo": RunOptions(logits_callback=seen)}}
    )
    trace = record(engine, "debate", handles_in(state["handles"]))
    assert trace.learnt_tokens == 4 * 9
    wanted = {}
    for entry in state["handles"]:
        place = (entry["author"], entry["superstep"], entry["branch"], entry["call"])
        if place in seen.logits:
            wanted[entry["handle"]["id"]] = torch.stack(seen.logits[place])
            message = trace.by_name[entry["handle"]["id"]]
            assert (message.author, message.role) == (entry["author"], "assistant")
    require_same_logits(trace if method == "choreo" else text_twin(trace), engine.model, wanted)
    asked = [engine.text(MessageHandle.model_validate(e["prompt"])) for e in state["handles"] if e.get("prompt")]
    assert len(asked) == 2 and all("Again." in words for words in asked)


def test_every_method_records_the_same_trace(make_engine: MakeEngine) -> None:
    """Text methods ignore where a view shows its messages, and still know."""
    drawn = draw_trace(random.Random(5), 9)
    traces = []
    for method in ("choreo", "baseline", "naive"):
        engine = make_engine(method=method, salt="s")
        handles = engine_handles(engine, drawn)
        trace = record(engine, "drawn", list(handles.values()))
        names = {handle.id: name for name, handle in handles.items()}
        traces.append(trace)
        renamed = [
            replace(message, name=names[message.name], parents=tuple(names[parent] for parent in message.parents))
            for message in trace.messages
        ]
        assert [replace(message, role=None) for message in renamed] == list(drawn.messages)
    assert traces[0] == traces[1] == traces[2]


def test_a_message_brings_all_that_it_descends_from(engine: Engine) -> None:
    root = engine.prefill([5, 6], author="root", role="system")
    middle = engine.decode([7], [root], [40], 50, sampling=Sampling(forced_token_ids=(8, 9)), author="ann")
    last = engine.decode(
        [7], [middle, root], [3, 9], 20, sampling=Sampling(forced_token_ids=(8,)), turn_suffix=[11, 12]
    )
    engine.release(root)
    engine.release(middle)
    trace = record(engine, "one", [last])
    assert [(m.tokens, m.offsets, m.position, m.learn, m.author, m.role) for m in trace.messages] == [
        ((5, 6), (), 0, None, "root", "system"),
        ((7, 8, 9), (40,), 50, (1, 3), "ann", "assistant"),
        ((7, 8, 11, 12), (3, 9), 20, (1, 2), None, "assistant"),
    ]
    assert trace.messages[2].parents == (middle.id, root.id)
    assert record(engine, "again", [last, last]).messages == trace.messages
    with pytest.raises(HandleError):
        record(engine, "gone", [middle])


@pytest.mark.slow
def test_a_long_chain_is_recorded(engine: Engine) -> None:
    handle = engine.prefill([5])
    for _ in range(1200):
        handle = engine.prefill([6], [handle], position=3)
    assert len(record(engine, "chain", [handle]).messages) == 1201


def test_closing_tokens_are_learnt_if_they_were_sampled(engine: Engine) -> None:
    forced = engine.decode([7, 8], sampling=Sampling(forced_token_ids=(9, 11)), turn_suffix=[11, 12])
    [message] = record(engine, "closed", [forced]).messages
    assert message.tokens == (7, 8, 9, 11, 12) and message.learn == (2, 4)


def test_what_was_prefilled_before_it_was_decoded_is_learnt(engine: Engine) -> None:
    given = engine.prefill([7, 8, 9])
    decoded = engine.decode([7, 8], sampling=Sampling(forced_token_ids=(9,)))
    assert given == decoded
    [message] = record(engine, "both", [given]).messages
    assert message.learn == (2, 3)
    # The same words, sampled from an earlier place on, and asked for their log-probabilities.
    engine.decode([7], sampling=Sampling(forced_token_ids=(8, 9), logprobs=1))
    [message] = record(engine, "both", [given]).messages
    assert message.learn == (1, 3) and len(engine.logprobs(given)) == 2


def test_what_was_decoded_before_it_was_prefilled_is_learnt(engine: Engine) -> None:
    decoded = engine.decode([7], sampling=Sampling(forced_token_ids=(8, 9)))
    reader = engine.prefill([5], [decoded])
    engine.release(decoded)
    assert engine.prefill([7, 8, 9]) == decoded
    said, _ = record(engine, "both", [reader]).messages
    assert said.learn == (1, 3)


def test_adapters_and_mapped_branches_are_recorded(make_engine: MakeEngine, tiny: LoadedModel, tmp_path: Path) -> None:
    adapters = {name: draw_adapter(tiny, name, seed=seed) for seed, name in enumerate(("one", "two"))}
    mapper = draw_mapper(tiny, seed=4)
    for name, adapter in adapters.items():
        write_adapter(tmp_path / name, adapter.parts, tiny.adapter.weights, name="tiny", dropout=0.0)
    mapper.save(tmp_path / "one", tiny.adapter.weights)
    seen: dict[str, list[Tensor]] = {"a": [], "b": [], "last": []}
    engine = make_engine()
    for name in adapters:
        engine.load_adapter(tmp_path / name)
    root = engine.prefill([5, 6, 7], adapter="two")
    calls = [
        Decode([8], [root], [30], 40, sampling=FREE, adapter=adapter, logits_callback=keep(seen[name]))
        for name, adapter in (("a", None), ("b", "one"))
    ]
    branches = engine.decode(calls)
    mapped = engine.branches.map(branches, "one")
    view = [root, *mapped]
    last = Decode([9, 10], view, [0, 3, 3], 20, sampling=FREE, adapter="one", logits_callback=keep(seen["last"]))
    [said] = engine.decode([last])
    trace = record(engine, "merged", [said])
    assert [(message.adapter, message.mapped) for message in trace.messages] == [
        ("two", False),
        (None, False),
        (None, True),
        ("one", False),
        (None, True),
        ("one", False),
    ]
    named = zip(("a", "b", "last"), (*branches, said), strict=True)
    wanted = {handle.id: torch.stack(seen[name]) for name, handle in named}
    require_same_logits(trace, tiny, wanted, adapters=adapters, mapper=mapper)


def keep(seen: list[Tensor]) -> Callable[[Tensor], None]:
    return lambda logits: seen.append(logits.detach().clone())


def test_a_copy_stands_where_its_source_was_encoded_last(
    make_engine: MakeEngine, tiny: LoadedModel, tmp_path: Path
) -> None:
    mapper = draw_mapper(tiny, seed=4)
    mapper.save(tmp_path / "one", tiny.adapter.weights)
    engine = make_engine()
    engine.load_adapter(tmp_path / "one")
    source = engine.prefill([5, 6, 7], position=10)
    [mapped] = engine.branches.map([source], "one")
    seen: list[Tensor] = []
    call = Decode([8], [mapped], [2], 9, sampling=FREE, logits_callback=keep(seen))
    [said] = engine.decode([call])
    engine.release(source)
    [again] = engine.prefill([Prefill([5, 6, 7], position=77)])
    assert again == source
    trace = record(engine, "moved", [said])
    require_same_logits(trace, tiny, {said.id: torch.stack(seen)}, mapper=mapper)
