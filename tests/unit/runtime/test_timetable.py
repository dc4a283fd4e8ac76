"""Two runs in the same steps."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from choreo_agents import Decode, Engine, Prefill, Sampling, Scheduling
from choreo_agents.errors import EngineFailedError
from choreo_agents.models import LoadedModel
from choreo_agents.runtime import step_trace as module
from choreo_agents.runtime.step_trace import StepTrace

FORCED = Sampling(forced_token_ids=(10, 11, 12))


def say(engine: Engine, *order: str) -> None:
    """Two authors prefill and decode, on threads of their own, one of them later."""

    def one(name: str, wait_s: float) -> None:
        time.sleep(wait_s)
        notes = engine.prefill(f"{name} has 3 red kites.", author=name)
        engine.decode([Decode([5], [notes], sampling=FORCED, author=name)])

    threads = [threading.Thread(target=one, args=(name, 0.03 * place)) for place, name in enumerate(order)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_another_engine_runs_the_same_steps_whoever_comes_first(tiny: LoadedModel) -> None:
    written = StepTrace()
    with Engine.load(tiny, scheduling=Scheduling(step_trace=written)) as engine:
        say(engine, "ann", "bob")
        steps = engine.stats().steps
    assert len(written.steps) == steps >= 4 and not written.is_replaying
    for order in (("ann", "bob"), ("bob", "ann")):
        again = written.replay()
        with Engine.load(tiny, scheduling=Scheduling(step_trace=again)) as engine:
            assert again.is_replaying
            say(engine, *order)
            assert again.steps == written.steps and not again.is_replaying
            engine.prefill("Whatever comes after is planned as ever.")


def test_labels_do_not_depend_on_which_encoding_words_are_taken_from(tiny: LoadedModel) -> None:
    """Calls that encode the same words again are one request, whoever comes first: it must have one name."""

    def last_step(taken_from_copy: bool) -> Any:
        written = StepTrace()
        with Engine.load(tiny, scheduling=Scheduling(step_trace=written)) as engine:
            said = engine.prefill("Ann has 3 red kites.", author="ann")
            root = engine.prefill("Look around.")
            [copy] = engine.prefill([Prefill(engine.tokens(said), [root], author="ann", source=said)])
            own = engine.prefill("Tell.", author="bob")
            source = copy if taken_from_copy else said
            engine.prefill([Prefill(engine.tokens(said), [own], author="ann", source=source)])
        return written.steps[-1]

    assert last_step(taken_from_copy=True) == last_step(taken_from_copy=False)


def test_labels_do_not_depend_on_words(tiny: LoadedModel) -> None:
    def steps(word: str) -> Any:
        written = StepTrace()
        with Engine.load(tiny, scheduling=Scheduling(step_trace=written)) as engine:
            root = engine.prefill(f"{word} has 3 red kites.", author="ann")
            engine.prefill([Prefill("Yes.", [root], author="bob"), Prefill("No.", [root], author="carl")])
        return written.steps

    assert steps("Ann") == steps("Bob")
    names = {name for step in steps("Ann") for name, _ in step}
    assert len(names) == 3


def test_one_authors_calls_of_other_lengths_are_told_apart_whoever_comes_first(tiny: LoadedModel) -> None:
    """Two nodes of one persona, asked something each: it is by chance which of them is first."""

    def asked(step_trace: StepTrace, *lengths: int) -> None:
        with Engine.load(tiny, scheduling=Scheduling(step_trace=step_trace)) as engine:
            root = engine.prefill([5, 6, 7], author="ann")
            calls = [Prefill(list(range(20, 20 + length)), [root], author="ann") for length in lengths]
            told = engine.prefill(calls)
            engine.decode([Decode([5], [each], sampling=FORCED, author=f"of {each.length}") for each in told])

    written = StepTrace()
    asked(written, 9, 10)
    again = written.replay()
    asked(again, 10, 9)
    assert again.steps == written.steps and not again.is_replaying


def test_calls_that_never_come_fail_the_others(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    written = StepTrace()
    with Engine.load(tiny, scheduling=Scheduling(step_trace=written)) as engine:
        engine.prefill("Ann has 3 red kites.", author="ann")
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    missed = pytest.raises(EngineFailedError, match="waits for 1 calls that were not made")
    with Engine.load(tiny, scheduling=Scheduling(step_trace=written.replay())) as engine, missed:
        engine.prefill("Ann has 3 red kites.", author="bob")
