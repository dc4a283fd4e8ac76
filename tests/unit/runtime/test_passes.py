"""Passes whose sizes recur: padded, run over the same memory again, captured and replayed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured import Recorder, engine_of, record
from support.families import FAMILIES, save_tiny
from torch import Tensor, nn

from choreo_agents import Decode, Engine, Sampling
from choreo_agents.models import load_model
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime import passes as room
from choreo_agents.runtime.executor import Executor
from choreo_agents.tracing import EventList, StepFailed

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test-triton sets it", allow_module_level=True)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny(tmp_path_factory.mktemp("model"), request.param, FAMILIES[request.param])
    return load_model(folder, dtype=torch.float32)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch)


@pytest.fixture
def events() -> Iterator[EventList]:
    """No step of which may fail: it would be run again, and nobody would see it."""
    kept = EventList()
    yield kept
    assert not [event for event in kept.events if isinstance(event, StepFailed)]


def spoken(engine: Engine, steps: int = 6) -> list[Any]:
    """What rows say over moved and reordered messages, and how likely it was: two, then three, then one of them."""
    shared = [engine.prefill([5 + i, *range(9, 20 + 3 * i)], []) for i in range(2)]
    sampling = Sampling(max_tokens=steps, stop_tokens=(), logprobs=1)
    calls = [Decode([7 + i], shared[::-1] if i % 2 else shared[:1], sampling=sampling) for i in range(3)]
    handles = [*engine.decode(calls[:2]), *engine.decode(calls), *engine.decode(calls[1:2])]
    return [(engine.tokens(handle), engine.logprobs(handle)) for handle in handles]


def test_replayed_or_not_the_same_bits(model: LoadedModel, recorder: Recorder, events: EventList) -> None:
    with engine_of(model, sink=events) as engine:
        replayed = spoken(engine)
        assert engine.admin.stats().graphs == recorder.captured > 0 and not engine.stats().graphs_why
    assert recorder.replayed >= 8
    with engine_of(model, graphs=False, sink=events) as engine:
        assert spoken(engine) == replayed
        assert engine.admin.stats().graphs == 0


def test_padded_passes_say_what_others_do(model: LoadedModel, recorder: Recorder, events: EventList) -> None:
    with engine_of(model, sink=events) as engine, engine_of(model, "folded") as other:
        for (tokens, likely), (wanted, likeliest) in zip(spoken(engine), spoken(other), strict=True):
            assert tokens == wanted
            for one, two in zip(likely, likeliest, strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_a_padded_pass_writes_its_own_slots_alone(model: LoadedModel, recorder: Recorder) -> None:
    with engine_of(model) as engine:
        pool = engine._core.pool
        first = engine.prefill([*range(9, 30)], [])
        for side in (*pool.keys, *pool.values):
            side[:, 64:] = torch.nan
        before = [side.clone() for side in (*pool.keys, *pool.values)]
        handle = engine.decode([Decode([5], [first], sampling=Sampling(max_tokens=6, stop_tokens=()))])[0]
        assert len(engine.tokens(handle)) == 7
        changed: set[int] = set()
        for side, was in zip((*pool.keys, *pool.values), before, strict=True):
            different = ~((side == was) | (side.isnan() & was.isnan()))
            changed |= {int(slot) for slot in different.any(dim=2).any(dim=0).nonzero()}
        assert len(changed) <= 7 and all(slot < 64 for slot in changed)


def test_new_weights_are_not_answered_by_what_was_captured(tmp_path: Path, recorder: Recorder) -> None:
    folder = save_tiny(tmp_path, "llama", FAMILIES["llama"])
    model = load_model(folder, dtype=torch.float32)
    with engine_of(model) as engine:
        old = spoken(engine)
        captured = recorder.captured
        layer: Any = model.adapter.model.get_decoder().layers[0]
        layer.mlp.down_proj.weight = nn.Parameter(-3.0 * layer.mlp.down_proj.weight, requires_grad=False)
        shared = engine.prefill([3, *range(9, 20)], [])
        call = Decode([7], [shared], sampling=Sampling(max_tokens=2, stop_tokens=(), logprobs=1))
        got = [engine.logprobs(handle) for handle in engine.decode([call])]
        assert recorder.captured == captured + 1, "the first that was replayed was found out, and captured again"
        with engine_of(model, graphs=False) as fresh:
            shared = fresh.prefill([3, *range(9, 20)], [])
            wanted = [fresh.logprobs(handle) for handle in fresh.decode([replace(call, parents=[shared])])]
        assert got == wanted
    assert old


def test_what_cannot_be_captured_runs_launch_by_launch(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, events: EventList
) -> None:
    def refuse(run: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    init = Executor.__init__

    def recording(self: Executor, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        self.passes._capture = refuse

    monkeypatch.setattr(Executor, "__init__", recording)
    with engine_of(model, sink=events) as engine:
        said = spoken(engine)
        assert engine.admin.stats().graphs == 0 and "not permitted" in engine.stats().graphs_why
    monkeypatch.undo()
    with engine_of(model, sink=events) as engine:
        assert spoken(engine) == said


def test_only_the_last_sizes_are_kept(
    model: LoadedModel, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, events: EventList
) -> None:
    monkeypatch.setattr(room, "MOST_SIZES", 1)
    with engine_of(model, sink=events) as engine:
        said = spoken(engine)
        assert engine.admin.stats().graphs <= 1
    with engine_of(model, graphs=False, sink=events) as engine:
        assert spoken(engine) == said


def test_sizes_that_nobody_meets_again_are_not_captured(model: LoadedModel, recorder: Recorder) -> None:
    with engine_of(model) as engine:
        engine.prefill([*range(9, 20)], [])
        engine.prefill([*range(9, 40)], [])
        assert recorder.captured == 0
