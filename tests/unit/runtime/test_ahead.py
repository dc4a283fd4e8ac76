"""Steps that are begun before the step before them has said its tokens: rows say the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured import Recorder, engine_of, record
from support.families import FAMILIES, save_tiny

from choreo_agents import Decode, Engine, Sampling
from choreo_agents.models import load_model
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime import executor
from choreo_agents.runtime.passes import FixedPass
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.sampling import DrawnTokens
from choreo_agents.tracing import EventList, StepFailed, StepRan

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test-triton sets it", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny(tmp_path_factory.mktemp("model"), "llama", {**FAMILIES["llama"], "num_hidden_layers": 1})
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch)


@pytest.fixture(scope="module")
def wanted(model: LoadedModel) -> list[Any]:
    """What rows say that nobody computes ahead."""
    with pytest.MonkeyPatch.context() as patched:
        record(patched)
        with engine_of(model, ahead=False) as engine:
            shared = engine.prefill([*range(9, 30)], [])
            return told(engine, engine.decode(calls(shared)))


@pytest.fixture
def events() -> Iterator[EventList]:
    kept = EventList()
    yield kept
    assert not [event for event in kept.events if isinstance(event, StepFailed)]


SAMPLED = Sampling(max_tokens=24, temperature=1.0, top_p=0.9, stop_tokens=(), logprobs=2)


def calls(shared: Any, count: int = 3, **changed: Any) -> list[Decode]:
    """Rows that end one after the other."""
    return [
        Decode([7 + i], [shared], sampling=SAMPLED.model_copy(update={"max_tokens": 7 + 5 * i, "seed": i} | changed))
        for i in range(count)
    ]


def told(engine: Engine, handles: list[Any]) -> list[Any]:
    return [(engine.tokens(handle), engine.logprobs(handle)) for handle in handles]


def test_the_same_words_ahead_or_not_while_rows_end(model: LoadedModel, events: EventList, wanted: list[Any]) -> None:
    with engine_of(model, sink=events) as engine:
        shared = engine.prefill([*range(9, 30)], [])
        assert told(engine, engine.decode(calls(shared))) == wanted
        # Each number of rows is captured at its fourth step, and the first step of a new number is not followed.
        assert engine.stats().decode_steps // 2 < engine.admin.stats().steps_ahead
        spied = engine.tenant("spy").stats()
        assert spied.steps_ahead == spied.graphs == 0, "what all do is no tenant's to know"


def test_no_pass_is_run_twice_when_a_row_ends(
    model: LoadedModel, events: EventList, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that was begun serves whoever goes on: what has ended writes in it what it said."""
    run: list[str] = []
    logits = FixedPass.logits

    def counted(self: FixedPass, tokens: Any, *given: Any) -> torch.Tensor:
        run.append("ahead" if isinstance(tokens, torch.Tensor) else "in time")
        return logits(self, tokens, *given)

    monkeypatch.setattr(FixedPass, "logits", counted)
    with engine_of(model, sink=events) as engine:
        shared = engine.prefill([*range(9, 30)], [])
        run.clear()
        events.events.clear()
        engine.decode(calls(shared))
        steps = sum(isinstance(event, StepRan) for event in events.events)
    assert "ahead" in run and len(run) - steps <= 1, "the last may have been begun for nobody"


def test_who_comes_changes_no_others_words(model: LoadedModel, events: EventList, wanted: list[Any]) -> None:
    with engine_of(model, sink=events) as engine:
        shared = engine.prefill([*range(9, 30)], [])
        found: dict[int, Any] = {}

        def say(place: int) -> None:
            found[place] = told(engine, engine.decode([calls(shared, max_tokens=20)[place]]))[0]

        threads = []
        for place in range(3):
            threads.append(threading.Thread(target=say, args=(place,)))
            threads[-1].start()
            steps = engine.stats().decode_steps
            while engine.stats().decode_steps < steps + 4 and threads[-1].is_alive():
                pass
        for thread in threads:
            thread.join()
        assert engine.admin.stats().steps_ahead > 4
        engine.check()
    for place, (tokens, likely) in enumerate(wanted):
        assert found[place][0][: len(tokens)] == tokens
        for one, two in zip(found[place][1], likely, strict=False):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_a_wrong_guess_is_computed_again(
    model: LoadedModel, events: EventList, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = DrawnTokens.__init__
    wrong: list[int] = []

    def guessing(self: DrawnTokens, given: torch.Tensor, draws: Any) -> None:
        init(self, given, draws)
        if len(wrong) % 3 == 0:
            # The kernel is not sure, and what it thinks likeliest is something else.
            given[0, 0], given[0, 2] = (given[0, 0] + 1) % 64, 2
        wrong.append(1)

    monkeypatch.setattr(DrawnTokens, "__init__", guessing)
    with engine_of(model, sink=events) as engine:
        shared = engine.prefill([*range(9, 30)], [])
        assert told(engine, engine.decode(calls(shared))) == wanted
        assert len(wrong) > 9


def test_a_prescribed_run_is_not_ahead_of_itself(model: LoadedModel, events: EventList) -> None:
    with engine_of(model, sink=events, step_trace=StepTrace()) as engine:
        engine.decode(calls(engine.prefill([*range(9, 30)], [])))
        assert engine.admin.stats().steps_ahead == 0


def test_a_run_that_is_recorded_is_ahead_of_itself(model: LoadedModel, events: EventList, tmp_path: Path) -> None:
    with engine_of(model, sink=events) as engine, engine.record(tmp_path / "run"):
        engine.decode(calls(engine.prefill([*range(9, 30)], [])))
        assert engine.admin.stats().steps_ahead > 0


def test_what_cannot_be_begun_ahead_is_run_when_its_time_comes(
    model: LoadedModel, events: EventList, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    logits = FixedPass.logits

    def refuse(self: FixedPass, tokens: Any, *given: Any) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            refused.append(1)
            raise RuntimeError("no room for it")
        return logits(self, tokens, *given)

    monkeypatch.setattr(FixedPass, "logits", refuse)
    with engine_of(model, sink=events) as engine:
        assert told(engine, engine.decode(calls(engine.prefill([*range(9, 30)], [])))) == wanted
        assert engine.admin.stats().steps_ahead == 0
    assert len(refused) == 1, "it is not tried at every step"


def test_weights_that_change_between_two_steps_are_those_of_the_second(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the second has begun or not; and what was captured is captured again."""
    folder = save_tiny(tmp_path, "llama", {**FAMILIES["llama"], "num_hidden_layers": 1})
    choose = executor.choose_tokens
    said: list[list[Any]] = []
    for ahead in (False, True):
        model = load_model(folder, dtype=torch.float32)
        weight: Any = model.adapter.model.get_decoder().layers[0].mlp.down_proj.weight
        steps: list[int] = []

        def changing(*given: Any, steps: list[int] = steps, weight: Any = weight) -> Any:
            chosen = choose(*given)  # the next step is begun in it, if any is begun ahead
            steps.append(1)
            if len(steps) == 9:
                weight.mul_(-3.0)
            return chosen

        monkeypatch.setattr(executor, "choose_tokens", changing)
        with engine_of(model, ahead=ahead) as engine:
            call = calls(engine.prefill([*range(9, 30)], []), max_tokens=20)[0]
            before = recorder.captured
            said += told(engine, engine.decode([call]))
            assert recorder.captured - before == 2
            assert engine.admin.stats().graphs == 1, "what is replayed is known, or nobody would let go of it"
            assert bool(engine.admin.stats().steps_ahead) == ahead
    assert said[0] == said[1]
