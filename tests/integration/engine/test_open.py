"""What a user adds to the engine from outside: a scheduling policy, and an attention backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.graphs import QUESTION, branches

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling, Scheduling
from choreo_agents.attention.backends import PreparedAttention, make_backend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.errors import EngineFailedError, InvalidRequestError, UnsupportedModelError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.runtime.loop import PAUSE_S
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Plan, Running, Waiting
from choreo_agents.tracing import FirstToken

SHORT = Sampling(max_tokens=6, stop_tokens=())


# --- scheduling policies ---


class ShortestPromptFirst:
    """Admits whoever has the fewest tokens to encode, as the engine's own policy would if they had come first."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        shortest = sorted(waiting, key=lambda each: each.pending)
        return FirstComeFirstServed().plan(shortest, running, free_tokens, limits)


class OneAtATime:
    """Owes nothing to the engine's own policy: no two requests share a step."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        if running:
            return Plan((), (), ((running[0].number, min(running[0].pending, limits.max_batched_tokens)),))
        first = next((each for each in waiting if each.ready), None)
        if first is None:
            return Plan((), (), ())
        if first.room > free_tokens:
            return Plan((), (first.number,), ())
        return Plan((first.number,), (), ((first.number, min(first.pending, limits.max_batched_tokens)),))


def said(engine: Engine) -> list[list[int]]:
    """What a few calls over each other answer, some of them at once."""
    root = engine.prefill(list(range(20, 60)))
    lazy = engine.prefill([Prefill(list(range(60, 60 + count)), [root], lazy=True) for count in (30, 5, 17)])
    answers = engine.decode([Decode([7], [root, each], sampling=SHORT) for each in lazy])
    last = engine.decode([8], [root, *answers[::-1]], sampling=SHORT)
    return [engine.tokens(each) for each in (*answers, last)]


def answers(engine: Engine) -> list[Any]:
    """What three agents at once say."""
    app = branches(["ann", "bob", "cid"], SHORT.model_copy(update={"seed": 3})).compile(engine=engine)
    return [message.content for message in app.invoke(QUESTION)["messages"]]


@pytest.mark.parametrize("policy", [ShortestPromptFirst(), OneAtATime()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("method", ["choreo", "baseline"])
def test_answers_are_the_same_under_any_policy(make_engine: MakeEngine, policy: Any, method: str) -> None:
    wanted = said(make_engine(method=method))
    for step_tokens in (512, 8):
        assert said(make_engine(method=method, policy=policy, max_batched_tokens=step_tokens)) == wanted


def test_a_graph_runs_under_a_policy_of_ones_own(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    words = []
    for policy in (FirstComeFirstServed(), ShortestPromptFirst(), OneAtATime()):
        engine = make_engine(embedded, policy=policy)
        words.append(answers(engine))
        rows = engine.stats().rows_per_step
        assert (rows == 1) == isinstance(policy, OneAtATime)
    assert words[0] == words[1] == words[2]


def test_a_policy_decides_who_is_first(make_engine: MakeEngine) -> None:
    prompts = [list(range(20, 20 + count)) for count in (90, 10, 50)]
    order = {}
    for policy in (FirstComeFirstServed(), ShortestPromptFirst()):
        events: list[Any] = []
        engine = make_engine(policy=policy, max_num_seqs=1, sink=events.append)
        engine.decode([Decode(prompt, sampling=SHORT) for prompt in prompts])
        order[type(policy)] = [event.request_id for event in events if isinstance(event, FirstToken)]
    assert order[FirstComeFirstServed] == [0, 1, 2] and order[ShortestPromptFirst] == [1, 2, 0]


def test_a_policy_is_told_whose_requests_they_are_and_how_urgent(make_engine: MakeEngine) -> None:
    seen: set[tuple[str, int]] = set()

    class Looking(FirstComeFirstServed):
        def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], *rest: Any) -> Plan:
            seen.update((each.tenant, each.priority) for each in (*waiting, *running))
            return super().plan(waiting, running, *rest)

    engine = make_engine(policy=Looking())
    engine.prefill([5] * 20, priority=2)
    engine.tenant("a").prefill([5] * 20)
    assert len(seen) == 2 and {priority for _, priority in seen} == {0, 2}


def test_a_policy_that_pauses_all_that_run_is_not_asked_all_the_time(make_engine: MakeEngine) -> None:
    """It is asked every few milliseconds, since nothing else may happen that would tell."""

    class Pausing(FirstComeFirstServed):
        until, asked = float("inf"), 0

        def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], *rest: Any) -> Plan:
            if running and self.until == float("inf"):
                self.until = time.perf_counter() + 0.3
            if running and time.perf_counter() < self.until:
                self.asked += 1
                return Plan((), (), ())
            return super().plan(waiting, running, *rest)

    policy = Pausing()
    engine = make_engine(policy=policy)
    assert engine.decode([7] * 20, sampling=SHORT).length == 26
    assert 1 <= policy.asked <= 0.3 / PAUSE_S + 1


@pytest.mark.parametrize("policy", [ShortestPromptFirst, object(), None, "fcfs"])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"plan\(waiting, running, free_tokens, limits\)"):
        Scheduling(policy=policy)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (None, "must return a Plan, not None"),
        (Plan((99,), (), ((99, 1),)), r"are not waiting: \[99\]"),
        (Plan((0, 0), (), ((0, 1),)), "twice"),
        (Plan((0,), (0,), ((0, 1),)), "twice"),
        (Plan((0,), (), ((0, 1), (0, 1))), "serves a request twice"),
        (Plan((), (), ((0, 1),)), "are not running"),
        (Plan((0,), (), ((0, 0),)), "no token"),
        (Plan((0,), (), ((0, 600),)), "600 tokens, more than max_batched_tokens=512"),
    ],
    ids=str,
)
def test_an_unsound_plan_fails_the_calls_and_says_why(make_engine: MakeEngine, plan: Any, complaint: str) -> None:
    class Wrong(FirstComeFirstServed):
        def plan(self, *situation: Any) -> Plan:
            return plan if self.is_wrong else super().plan(*situation)

        is_wrong = True

    policy = Wrong()
    engine = make_engine(policy=policy)
    with pytest.raises(EngineFailedError, match=complaint) as caught:
        engine.prefill([5] * 20)
    assert isinstance(caught.value.__cause__, InvalidRequestError)
    policy.is_wrong = False
    assert engine.prefill([5] * 20).length == 20


# --- backends ---


class Counting:
    """Counts what it is asked for, and lets the reference answer."""

    def __init__(self) -> None:
        self.inner = make_backend("reference", torch.float32, torch.device("cpu"))
        self.prepared = 0

    def prepare(self, layout: Layout, kind: AttentionKind) -> PreparedAttention:
        self.prepared += 1
        return self.inner.prepare(layout, kind)


class Forgetful(Counting):
    """Is right about what stands where it was encoded, and wrong about what was moved."""

    def prepare(self, layout: Layout, kind: AttentionKind) -> PreparedAttention:
        return self.inner.prepare(layout, AttentionKind(None, kind.window, kind.softcap))


class Silent(Counting):
    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        prepared = super().prepare(layout, kind)

        class Nothing:
            def __init__(self) -> None:
                self.layout = prepared.layout

            def attend(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
                return torch.zeros_like(query)

        return Nothing()


def test_a_backend_of_ones_own_serves(make_engine: MakeEngine, tiny_path: Path) -> None:
    wanted = said(make_engine())
    backend = Counting()
    engine = make_engine(tiny_path, backend=backend)
    probed = backend.prepared
    assert probed == 1, "the model was checked with the backend that serves: four times two segments in one step"
    assert said(engine) == wanted
    assert backend.prepared - probed == engine.stats().steps
    assert engine.admin is not None
    before = backend.prepared
    engine.admin.restart()
    assert backend.prepared == before, "it was checked already"


def test_a_graph_runs_on_a_backend_of_ones_own(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    backend = Counting()
    wanted = answers(make_engine(embedded))
    engine = make_engine(embedded, backend=backend)
    probed = backend.prepared
    assert answers(engine) == wanted
    assert backend.prepared - probed == engine.stats().steps >= SHORT.max_tokens


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(Forgetful, "not a pure rotation"), (Silent, "does not attend causally")]
)
def test_a_wrong_backend_is_found_out_when_the_model_is_loaded(
    tiny: LoadedModel, tiny_path: Path, wrong: Any, complaint: str
) -> None:
    for model in (tiny, tiny_path):
        with pytest.raises(UnsupportedModelError, match=f"{complaint}.*or {wrong.__name__} is wrong"):
            Engine.load(model, backend=wrong())
    with pytest.raises(UnsupportedModelError, match=wrong.__name__):
        load_model(tiny_path, backend=wrong())


@pytest.mark.parametrize("backend", ["cpu", "cuda", "fastest", None, Counting, object()])
def test_what_is_no_backend_is_refused(tiny: LoadedModel, backend: Any) -> None:
    with pytest.raises(
        ValueError, match=r"'auto', 'reference', 'folded', 'native', 'varlen', 'triton', or an object with `prepare"
    ):
        Engine.load(tiny, backend=backend)
    with pytest.raises(InvalidRequestError, match="or an object with `prepare"):
        load_model("nowhere at all", backend=backend)


def test_every_backend_of_the_engines_own_is_checked_once(make_engine: MakeEngine, tiny_path: Path) -> None:
    model = load_model(tiny_path)
    for name in ("auto", "folded", "reference", "reference"):
        assert make_engine(model, backend=name).prefill([5, 6]).length == 2
    assert set(model.checked_backends) == {"auto", "folded", "reference"}
    assert isinstance(make_engine(model, backend="reference").prefill([5]), MessageHandle)
