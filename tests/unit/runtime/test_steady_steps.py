"""A step that follows on the last one without a look at each request is the step that would have been decided."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import MakeEngine

from choreo_agents.engine import Decode, Prefill
from choreo_agents.errors import EngineClosedError, RequestTimeoutError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.loop import EngineLoop, NextStep, NextSteps
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.sampling import Sampling

Act = Callable[[], object]


class Watched:
    """An engine's steps, compared with what is decided anew; and what is to be done behind some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steady = 0
        self.compares = True
        self.rows: list[int] = []
        self.acts: dict[int, list[Act]] = {}
        """Done on the engine's thread, under its lock, once so many steps were accounted for."""
        decide, plan, account = NextSteps.decide, NextSteps._plan, EngineLoop._account
        planned: list[int] = []

        def counted(*given: Any) -> Any:
            planned.append(1)
            return plan(*given)

        def decided(steps: NextSteps, *went_on: Any) -> NextStep:
            planned.clear()
            found = decide(steps, *went_on)
            if not planned:
                self.steady += 1
                if self.compares:
                    self._compare(steps, found)
            return found

        def accounted(loop: EngineLoop, rows: Any, *rest: Any) -> None:
            account(loop, rows, *rest)
            if rows:
                self.rows.append(len(rows))
                for act in self.acts.pop(len(self.rows), ()):
                    act()

        monkeypatch.setattr(NextSteps, "_plan", counted)
        monkeypatch.setattr(NextSteps, "decide", decided)
        monkeypatch.setattr(EngineLoop, "_account", accounted)

    @staticmethod
    def _compare(steps: NextSteps, found: NextStep) -> None:
        running = list(steps._active.running.values())
        assert not steps._active.waiting and found.unfinished == len(running)
        anew = steps._plan_step()
        assert anew.rows == found.rows and anew.arrivals == found.arrivals == []
        assert dict(anew.samplers) == dict(found.samplers) and anew.unfinished == found.unfinished
        assert all(row.view is other.view for row, other in zip(anew.rows, found.rows, strict=True))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def decode(word: int, tokens: int, **more: Any) -> Decode:
    return Decode([word], sampling=Sampling(max_tokens=tokens, stop_tokens=()), **more)


def settled(answers: list[Any]) -> list[Any]:
    """Handles, or why there is none."""
    found: list[Any] = []
    for answer in answers:
        try:
            found.append(answer.result(60))
        except BaseException as error:
            found.append(type(error))
    return found


def test_most_steps_of_a_decode_are_not_decided(make_engine: MakeEngine, watched: Watched) -> None:
    engine = make_engine()
    engine.decode([decode(3, 30), decode(4, 30)])
    assert watched.rows == [2] * len(watched.rows)
    # The first prefills and samples; the second finds out that all decode; in the last the message's end is encoded.
    assert watched.steady >= len(watched.rows) - 3


def test_who_has_cancelled_is_not_in_the_next_step(make_engine: MakeEngine, watched: Watched) -> None:
    engine, answers = make_engine(), list[Any]()
    watched.acts[10] = [lambda: [answers[1].cancel()]]
    answers += engine._tenant.submit([decode(3, 30), decode(4, 30)], None)
    assert settled(answers)[0] not in (None, EngineClosedError)
    assert watched.rows[:10] == [2] * 10 and set(watched.rows[10:]) == {1} and watched.steady > 20


def test_who_waits_for_the_same_and_cancels_last_is_noticed(make_engine: MakeEngine, watched: Watched) -> None:
    engine = make_engine()
    memo = {"idempotency_key": "same"}
    first, others = list[Any](), list[Any]()
    watched.acts[5] = [lambda: others.extend(engine._tenant.submit([decode(3, 60, **memo)], None))]
    watched.acts[9] = [lambda: [each.cancel() for each in first]]
    watched.acts[14] = [lambda: [each.cancel() for each in others]]
    first += engine._tenant.submit([decode(3, 60, **memo)], None)
    settled(first)
    until(lambda: bool(others) and not engine._core.loop.unfinished())
    assert len(watched.rows) == 14 and watched.steady > 7


def test_who_waits_for_the_same_and_gives_up_is_noticed_by_the_next_step(
    make_engine: MakeEngine, watched: Watched
) -> None:
    engine, others, over = make_engine(), list[Any](), list[bool]()
    same, watched.compares = {"idempotency_key": "same"}, False  # to decide anew would look at who waits
    watched.acts[5] = [lambda: others.extend(engine._tenant.submit([decode(3, 60, timeout_s=0.0, **same)], None))]
    watched.acts[7] = [lambda: over.append(others[0].done())]
    [first] = settled(engine._tenant.submit([decode(3, 60, **same)], None))
    assert isinstance(first, MessageHandle) and settled(others) == [RequestTimeoutError] and over == [True]


def test_who_comes_is_in_the_next_step(make_engine: MakeEngine, watched: Watched) -> None:
    engine, late = make_engine(), list[Any]()
    watched.acts[10] = [lambda: late.extend(engine._tenant.submit([decode(4, 5)], None))]
    settled(engine._tenant.submit([decode(3, 30)], None))
    settled(late)
    assert watched.rows[9:12] == [1, 2, 2] and watched.steady > 15


def test_who_gives_up_is_not_in_the_next_step(make_engine: MakeEngine, watched: Watched) -> None:
    engine = make_engine()
    engine.decode([decode(5, 5)])
    watched.rows.clear()
    answers = engine._tenant.submit([decode(3, 60), decode(4, 60, timeout_s=1.0)], None)
    watched.acts[10] = [lambda: time.sleep(1.1)]
    assert settled(answers)[1] is RequestTimeoutError
    assert watched.rows[9] == 2 and watched.rows[10] == 1


def test_while_somebody_waits_steps_are_decided(make_engine: MakeEngine, watched: Watched, tiny: LoadedModel) -> None:
    """Here for room; what is compared is never a step beside which somebody waits."""
    engine = make_engine(kv_budget_bytes=128 * tiny.adapter.geometry.bytes_per_token)
    engine.decode([decode(word, 40) for word in (3, 4, 5)])
    assert watched.rows.count(2) > 30 and watched.rows[-1] == 1
    assert watched.steady < watched.rows.count(1), "two of them never ran without one that waited"


def test_who_leaves_is_not_in_the_next_step(make_engine: MakeEngine, watched: Watched) -> None:
    engine = make_engine()
    left, answers = engine.tenant("left"), list[Any]()
    watched.acts[2] = [lambda: answers.extend(left._tenant.submit([decode(4, 40)], None))]
    watched.acts[12] = [left.close]
    settled(engine._tenant.submit([decode(3, 40)], None))
    assert settled(answers) == [EngineClosedError]
    assert 2 in watched.rows[:12] and set(watched.rows[12:]) == {1}


def test_a_timetable_holds_steps_that_were_not_decided(make_engine: MakeEngine, watched: Watched) -> None:
    step_trace, watched.compares = StepTrace(), False  # it would be told twice
    engine = make_engine(step_trace=step_trace)
    engine.decode([decode(3, 12), decode(4, 12)])
    assert watched.steady and [len(step) for step in step_trace.steps] == watched.rows


def until(there: Act) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_between_steps(make_engine: MakeEngine, watched: Watched, seed: int) -> None:
    drawn, engine = random.Random(seed), make_engine()
    seen = engine.prefill([7] * 30)
    answers: list[Any] = []

    def submit() -> None:
        calls: list[Any] = [
            decode(drawn.randrange(3, 90), drawn.randrange(1, 40), parents=drawn.choice([[], [seen]]))
            for _ in range(drawn.randrange(1, 4))
        ]
        calls += [Prefill([drawn.randrange(3, 90)] * 9)] * drawn.randrange(2)
        answers.extend(engine._tenant.submit(calls, None))

    def cancel() -> None:
        if answers:
            drawn.choice(answers).cancel()

    for step in range(1, 80):
        watched.acts[step] = [submit] if drawn.random() < 0.1 else [cancel] if drawn.random() < 0.1 else []
    with engine._core.lock:
        submit()
    until(lambda: not engine._core.loop.unfinished() and all(answer.done() for answer in answers))
    assert watched.steady
