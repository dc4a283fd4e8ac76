"""One packed forward over whole traces equals running the engine call by call, to 1e-4 in fp32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, save_tiny
from support.traces import (
    draw_adapter,
    draw_mapper,
    draw_trace,
    engine_logits,
    stepwise_logits,
    with_adapters,
    with_mapped,
)

from choreo_agents import Engine, Memory
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.forward import TraceForward

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp(request.param)
    return load_model(save_tiny(path, request.param, FAMILIES[request.param], seed=3))


def test_the_packed_pass_equals_the_engine(model: LoadedModel) -> None:
    rng = random.Random(f"packed {Path(model.name).name}")
    traces = [draw_trace(rng, rng.randint(1, 9), name=str(number)) for number in range(3)]
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        wanted = torch.cat([engine_logits(engine, trace) for trace in traces])
    with torch.no_grad():
        learnt = TraceForward(model).logits(traces)
    assert learnt.logits.shape == wanted.shape
    error = (learnt.logits.float() - wanted).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error}"


def test_adapters_and_mapped_messages_equal_the_stepwise_reference(model: LoadedModel) -> None:
    rng = random.Random(f"adapted {Path(model.name).name}")
    drawn = [with_mapped(draw_trace(rng, 9, longest=12, name=str(number)), rng) for number in range(3)]
    traces = [with_adapters(trace, [None, "one", "two"], rng) for trace in drawn]
    adapters = {name: draw_adapter(model, name, seed=seed) for seed, name in enumerate(("one", "two"))}
    mapper = draw_mapper(model, seed=5)
    wanted = torch.cat([stepwise_logits(model, trace, adapters, mapper) for trace in traces])
    with torch.no_grad():
        learnt = TraceForward(model, adapters=adapters, mapper=mapper).logits(traces)
        plain = TraceForward(model, adapters=adapters, mapper=draw_mapper(model, seed=6)).logits(traces)
    error = (learnt.logits.float() - wanted).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error}"
    assert (plain.logits.float() - wanted).abs().max().item() > 100 * TOLERANCE, "the mapper makes no difference"
