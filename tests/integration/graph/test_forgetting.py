"""What threads and runs hold, how it is given back, and how a thread goes on that was forgotten."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from conftest import MakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from support.two_models import ASKED, chain, speaker

from choreo_agents import START, Agent, ChoreoGraph, ChoreoState, Engine, Memory, Sampling
from choreo_agents.engine.messages import thread_leases
from choreo_agents.errors import (
    ForeignThreadError,
    InvalidRequestError,
    LineageWarning,
    ReleasedHandleError,
    ThreadBusyError,
    UnknownHandleError,
)
from choreo_agents.graph.state import handles_of
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.testing import Script

SHORT = Sampling(max_tokens=4, temperature=0.0)


def config(thread: str = "1") -> Any:
    return {"configurable": {"thread_id": thread}}


def asked(words: str = "What does Ann have?") -> Any:
    return {"messages": [("user", words)]}


def pair_graph(**options: Any) -> ChoreoGraph:
    """Ann answers, Bob reads her."""
    graph = ChoreoGraph(system="Be brief.")
    graph.add_node(Agent("ann", system="You are Ann.", prompt="Say it.", sampling=SHORT))
    graph.add_node(Agent("bob", sampling=SHORT)).add_edge(START, "ann").add_edge("ann", "bob", **options)
    return graph


def handles(state: Any) -> list[MessageHandle]:
    return [handle for entry in state["handles"] for handle in handles_of(entry)]


def held(engine: Engine) -> tuple[int, ...]:
    """All that grows if anything does: leases, messages, what is known, idempotency keys, and who holds them."""
    table, stats = engine._core.table, engine.stats()
    sizes = (table._leased, table._known, table.memos, table._in_scope, engine._core.cache._entries)
    return (stats.leases, stats.threads, stats.kv_bytes, *map(len, sizes))


class Clock:
    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        engine._core.thread_leases.clock = lambda: self.now  # type: ignore[method-assign]


def idle(patch: pytest.MonkeyPatch, **limits: float) -> None:
    """Have what is idle be forgotten sooner: `s`, `runs` and `messages`."""
    for name, limit in limits.items():
        patch.setattr(thread_leases, f"IDLE_{name.upper()}", limit)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**limits: float) -> Engine:
        """Those of `idle`."""
        idle(monkeypatch, **limits)
        made.append(Script(default="Fine.").load(memory=Memory(kv_budget_bytes=1 << 22), salt="s"))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
        engine.close()


# A service that never releases


@pytest.mark.parametrize("runs", [30, pytest.param(1600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", [False, True])
def test_a_service_that_never_releases_holds_no_more_and_no_more(scripted: Any, runs: int, kept: bool) -> None:
    engine = scripted(runs=4, messages=30)
    app = pair_graph().compile(InMemorySaver() if kept else None, engine=engine)
    seen = []
    for run in range(runs):
        app.invoke(asked(f"What does {run:04} have?"), config(str(run)) if kept else None)
        seen.append(held(engine))
    assert seen[15] == seen[-1] and max(seen) == seen[-1]
    assert engine.stats().threads <= 30 // 5 if kept else engine.stats().threads == 4


def test_equal_runs_leave_nothing_on_the_messages_that_they_share(scripted: Any) -> None:
    """Its answer is the same message each time, and never without a lease: what is noted on it must not grow."""
    engine = scripted(runs=2)
    app = pair_graph().compile(engine=engine)
    for _ in range(10):
        app.invoke(asked())
    for message in engine._core.table.messages():
        assert len(message.idempotency_keys) <= 2 and len(message.scoped) <= 2 and message.leases <= 2


@pytest.mark.parametrize("kept", [False, True])
def test_nor_do_runs_in_scopes_of_their_own(scripted: Any, kept: bool) -> None:
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    app.invoke(asked(), config("has them, too"))
    before = held(engine)
    for run in range(5):
        with engine.scope():
            (app if kept else pair_graph().compile(engine=engine)).invoke(asked(), config(str(run)))
    assert held(engine) == before


def test_words_that_every_run_encodes_again_do_not_keep_whose_they_were(scripted: Any) -> None:
    engine = scripted(runs=2)
    app = pair_graph(visibility="reencoded").with_rule(START, "bob", "private").compile(engine=engine)
    for run in range(10):
        app.invoke(asked(f"What does {run:04} have?"))
    gc.collect()
    known = list(engine._core.table._known.values())
    assert max(len(message.sources) for message in known) == 3, "of the idle ones, and of that under way"
    assert len(known) < 20


def test_words_that_others_hold_do_not_keep_whose_they_were(scripted: Any) -> None:
    engine = scripted()
    app = pair_graph(visibility="reencoded", scope="public").compile(InMemorySaver(), engine=engine)
    for thread in ("1", "2"):
        app.invoke(asked(f"What does {thread} have?"), config(thread))
    [again] = [message for message in engine._core.table.messages() if len(message.sources) == 2]
    app.delete_thread("1")
    assert len(again.sources) == 1


def test_what_somebody_held_first_is_held_by_its_threads_as_well(scripted: Any) -> None:
    engine = scripted()
    root = engine.prefill(engine.chat.root("Be brief."))
    pair_graph().compile(InMemorySaver(), engine=engine).invoke(asked(), config())
    engine.release(root)
    assert engine.text(root), "the thread goes on with it"
    engine.threads.forget("1")
    assert not any(held(engine))


def test_nothing_is_kept_of_what_was_said_of_threads_that_were_forgotten(scripted: Any) -> None:
    """Python keeps the text of each warning for good that is not to be shown twice: these are all different."""
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine)

    def noted() -> int:
        modules = [module for name, module in sys.modules.items() if name.startswith("choreo_agents")]
        return sum(len(getattr(module, "__warningregistry__", ())) for module in modules)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, category, *_: told.append(category)
        told: list[Any] = []
        seen = []
        for thread in range(4):
            app.invoke(asked(), config(str(thread)))
            engine.threads.forget(str(thread))
            app.invoke(asked("And Bob?"), config(str(thread)))
            seen.append(noted())
    assert told.count(LineageWarning) >= 4, "each is told"
    assert seen[0] == seen[-1]


def test_the_last_runs_can_be_looked_at_and_gone_on_with(scripted: Any) -> None:
    engine = scripted(runs=1)
    app = pair_graph().compile(engine=engine)
    first = app.invoke(asked())
    second = app.invoke(asked("And Bob?"))
    assert engine.text(handles(second)[-1])
    for handle in handles(first)[1:]:
        with pytest.raises(UnknownHandleError, match="deleted it with its thread"):
            engine.text(handle)
    third = app.invoke({**second, "messages": [*second["messages"], ("user", "And Carl?")]})
    assert engine.text(handles(second)[-1]) == engine.text(handles(third)[2]), "what it was handed, it holds"
    assert (
        app.invoke({**first, "messages": [*first["messages"], ("user", "And Carl?")]})["messages"][-1].text == "Fine."
    )


def test_no_runs_at_all_may_be_kept(scripted: Any) -> None:
    engine = scripted(runs=0)
    pair_graph().compile(engine=engine).invoke(asked())
    assert engine.stats().leases == engine.stats().threads == 0


async def test_stock_graphs_are_bounded_too(scripted: Any) -> None:
    engine = scripted(messages=40)
    stock: Any = StateGraph(ChoreoState).add_node("ann", Agent("ann", engine=engine, sampling=SHORT))
    stock.add_edge(START, "ann")
    app, seen = stock.compile(), []
    for run in range(18):
        await app.ainvoke(asked(f"What does {run:04} have?"))
        seen.append(held(engine))
    assert seen[-1] == seen[14]
    kept = stock.compile(InMemorySaver())
    await kept.ainvoke(asked(), config("stock"))
    before = engine.stats().threads
    engine.threads.forget("stock")
    assert engine.stats().threads == before - 1


# Forgetting a thread


def test_nothing_is_left_of_a_thread_that_is_forgotten(scripted: Any) -> None:
    engine, saver = scripted(), InMemorySaver()
    app = pair_graph().compile(saver, engine=engine)
    state = app.invoke(asked(), config())
    app.invoke(asked("And Bob?"), config())
    assert engine.stats().leases and engine.stats().threads == 1
    app.delete_thread("1")
    assert not any(held(engine)), "leases, idempotency keys, messages and KV"
    assert not saver.storage and not app.get_state(config()).values
    with pytest.raises(UnknownHandleError):
        engine.tokens(handles(state)[0])
    app.delete_thread("1")
    app.delete_thread("never there")
    pair_graph().compile(engine=engine).delete_thread("of none")
    assert app.invoke(asked(), config())["messages"][-1].text == "Fine."


async def test_the_async_form_does_the_same(scripted: Any) -> None:
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    stream = app.astream(asked(), config())
    await anext(stream)
    with pytest.raises(ThreadBusyError):
        await app.adelete_thread("1")
    await stream.aclose()
    await app.ainvoke(asked(), config())
    await app.adelete_thread("1")
    assert not any(held(engine)) and not (await app.aget_state(config())).values


def test_subgraphs_and_interrupted_runs_are_their_threads(scripted: Any) -> None:
    engine = scripted()
    outer = ChoreoGraph().add_node("team", pair_graph().compile(engine=engine)).add_node(Agent("judge", sampling=SHORT))
    outer.add_edge(START, "team").add_edge("team", "judge")
    app = outer.compile(InMemorySaver(), engine=engine, interrupt_before=["judge"])
    app.invoke(asked(), config())
    assert engine.stats().threads == 1 and engine.stats().leases
    app.delete_thread("1")
    assert not any(held(engine))


def asks_a_graph(engine: Engine, saver: InMemorySaver | None) -> Any:
    """Ann's prompt is what a graph of its own has said, run by the function that makes the prompt."""
    helper = ChoreoGraph().add_node(Agent("helper", sampling=SHORT)).add_edge(START, "helper").compile(engine=engine)
    graph = ChoreoGraph()
    graph.add_node(Agent("ann", prompt=lambda _: helper.invoke(asked("Help."))["messages"][-1].text, sampling=SHORT))
    return graph.add_edge(START, "ann").compile(saver, engine=engine)


@pytest.mark.parametrize("how", ["forget", "expire", "scope", "close"])
@pytest.mark.parametrize("kept", [True, False])
def test_graphs_that_functions_of_an_agent_run_leave_nothing_either(scripted: Any, how: str, kept: bool) -> None:
    whole = scripted(s=10.0)
    engine, clock = whole.tenant("acme"), Clock(whole)
    app = asks_a_graph(engine, InMemorySaver() if kept else None)
    with engine.scope() if how == "scope" else nullcontext():
        for _ in range(2):
            app.invoke(asked(), config() if kept else None)
        assert engine.stats().threads == (1 if kept else 2) and engine.stats().leases
    if how == "forget" and kept:
        app.delete_thread("1")
    elif how in ("forget", "expire"):
        clock.now = 20.0
        engine.threads.expire()
    elif how == "close":
        engine.close()
    assert not any(held(whole))


def test_every_engine_of_the_graph_forgets(make_engine: MakeEngine) -> None:
    engines = {"small": make_engine(salt="s"), "large": Script(default="Fine.").load(salt="s")}
    graph = chain([speaker("ann", "small"), speaker("bob", "large")])
    app = graph.compile(InMemorySaver(), engine=engines)
    app.invoke(ASKED, config())
    assert all(engine.stats().leases for engine in engines.values())
    app.delete_thread("1")
    assert not any(engine.stats().leases or engine.stats().threads for engine in engines.values())
    engines["large"].close()


def test_a_thread_under_way_is_not_forgotten(scripted: Any) -> None:
    engine, refused = scripted(), []
    graph = pair_graph()

    def forget(_: Any) -> dict[str, Any]:
        with pytest.raises(ThreadBusyError, match="'1' is running") as error:
            app.delete_thread("1")
        refused.append(error)
        return {}

    graph.add_node("between", forget).add_edge("ann", "between").add_edge("between", "bob", visibility={})
    app = graph.compile(InMemorySaver(), engine=engine)
    other = app.invoke(asked(), config("2"), interrupt_before=["between"])
    state = app.invoke(asked(), config())
    assert refused and engine.text(handles(state)[0]) and engine.text(handles(other)[0])
    stream = app.stream(asked("More."), config())
    next(stream)
    with pytest.raises(ThreadBusyError):
        app.delete_thread("1")
    stream.close()
    app.delete_thread("1")
    assert engine.stats().threads == 1, "the other's"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_thread_is_not_forgotten_while_a_run_looks_at_its_state(scripted: Any, is_async: bool) -> None:
    class Saver(InMemorySaver):
        def get_tuple(self, config: Any) -> Any:
            found = super().get_tuple(config)
            if known:
                with pytest.raises(ThreadBusyError, match="'1' is running"):
                    app.delete_thread("1")
            return found

    known: list[Any] = []
    app = pair_graph().compile(Saver(), engine=scripted())
    known += app.invoke(asked(), config())["messages"]
    given = {"messages": [*known, ("user", "More.")]}
    state = asyncio.run(app.ainvoke(given, config())) if is_async else app.invoke(given, config())
    assert state["messages"][: len(known)] == known


def test_a_thread_does_not_run_while_it_is_forgotten(scripted: Any) -> None:
    class Saver(InMemorySaver):
        def delete_thread(self, thread_id: str) -> None:
            with pytest.raises(ThreadBusyError, match="is being deleted"):
                app.invoke(asked(), config(thread_id))
            with pytest.raises(ThreadBusyError):
                app.delete_thread(thread_id)
            super().delete_thread(thread_id)

    engine = scripted()
    app = pair_graph().compile(Saver(), engine=engine)
    app.invoke(asked(), config())
    app.delete_thread("1")
    assert not any(held(engine))


def test_if_the_state_cannot_be_deleted_nothing_is_forgotten(scripted: Any) -> None:
    class Saver(InMemorySaver):
        def delete_thread(self, thread_id: str) -> None:
            raise NotImplementedError

    engine = scripted()
    app = pair_graph().compile(Saver(), engine=engine)
    app.invoke(asked(), config())
    before = held(engine)
    with pytest.raises(InvalidRequestError, match="does not implement delete_thread"):
        app.delete_thread("1")
    assert held(engine) == before
    app.invoke(asked("And Bob?"), config())


def test_a_fork_keeps_what_it_has(scripted: Any) -> None:
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    first = app.invoke(asked(), config())
    app.update_state(config("fork"), {name: first[name] for name in ("messages", "handles")}, as_node="bob")
    app.invoke(asked("And Bob?"), config("fork"))
    app.delete_thread("1")
    assert [engine.text(handle) for handle in handles(first)]
    before = engine.stats()
    state = app.invoke(asked("And Carl?"), config("fork"))
    assert handles(state)[: len(handles(first))] == handles(first)
    assert engine.stats().tokens_recomputed == before.tokens_recomputed == 0
    app.delete_thread("fork")
    assert not any(held(engine))


def test_what_somebody_holds_or_has_pinned_stays(scripted: Any) -> None:
    engine = scripted(runs=0, s=10.0)
    clock = Clock(engine)
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    root = engine.prefill(engine.chat.root("Be brief."))
    state = app.invoke(asked(), config())
    engine.kv.pin(handles(state)[-1])
    clock.now = 20.0
    engine.threads.expire()
    assert engine.text(handles(state)[0]), "it has a pinned message"
    engine.kv.unpin(handles(state)[-1])
    engine.threads.expire()
    assert engine.stats().leases == 1 and engine.text(root)
    app.delete_thread("1")
    assert engine.stats().leases == 1
    engine.release(root)


def test_a_scope_around_a_run_ends_what_its_threads_hold(scripted: Any) -> None:
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    app.invoke(asked(), config("before"))
    before = held(engine)
    with engine.scope():
        state = app.invoke(asked("And Bob?"), config())
        app.invoke(asked("And Carl?"), config("before"))
        assert engine.text(handles(state)[-1])
    assert held(engine) == before
    with pytest.raises(ReleasedHandleError):
        engine.text(handles(state)[-1])
    with engine.scope():
        app.invoke(asked("And Dora?"), config("short"))
        app.delete_thread("short")
        assert held(engine) == before


def test_the_end_of_a_scope_is_no_use_of_a_thread(scripted: Any) -> None:
    engine = scripted(s=100.0)
    clock = Clock(engine)
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    app.invoke(asked(), config("old"))
    outside = copy_context()
    with engine.scope():
        app.invoke(asked("And Carl?"), config("old"))
        clock.now = 50.0
        outside.run(app.invoke, asked(), config("new"))
    clock.now = 101.0
    engine.threads.expire()
    assert engine.stats().threads == 1, "the new one: the old one is due"
    app.delete_thread("new")
    assert not any(held(engine))


# Tenants

_salt: ContextVar[str] = ContextVar("_salt")


def test_a_thread_is_forgotten_by_its_tenant_alone(scripted: Any) -> None:
    engine = scripted()
    app = pair_graph().compile(InMemorySaver(), engine=engine, tenant=lambda _: _salt.get())
    _salt.set("acme")
    app.invoke(asked(), config())
    acme, other = engine.tenant("acme"), engine.tenant("other")
    before = acme.stats().leases
    _salt.set("other")
    with pytest.raises(ForeignThreadError):
        app.delete_thread("1")
    app.invoke(asked(), config("2"))
    other.threads.forget("1")
    assert acme.stats().leases == before and acme.stats().threads == other.stats().threads == 1
    _salt.set("acme")
    app.delete_thread("1")
    assert acme.stats().leases == acme.stats().threads == 0 and other.stats().leases
    _salt.set("other")
    app.invoke(asked(), config())
    assert app.get_state(config()).values, "the name is free again"
    other.close()
    assert engine.admin.stats().leases == engine.admin.stats().threads == 0


# Going on with what was forgotten


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_a_thread_that_was_idle_goes_on_as_after_a_restart(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    idle(monkeypatch, s=60.0)
    answers, recomputed, ids = [], [], []
    for restarts in (False, True):
        saver, engine = InMemorySaver(), make_engine(salt="s")
        clock = Clock(engine)
        app = pair_graph(visibility=mode).compile(saver, engine=engine)
        app.invoke(asked(), config())
        clock.now = 59.0
        engine.threads.expire()
        assert engine.stats().threads == 1
        clock.now = 61.0
        engine.threads.expire()
        assert not any(held(engine))
        if restarts:
            engine = make_engine(salt="s")
            app = pair_graph(visibility=mode).compile(saver, engine=engine)
        state = app.invoke(asked("And Bob?"), config())
        answers.append([message.text for message in state["messages"]])
        recomputed.append(engine.stats().tokens_recomputed)
        ids.append([handle.id for handle in handles(state)])
    assert answers[0] == answers[1] and ids[0] == ids[1]
    assert recomputed[0] == recomputed[1] > 0, "what was known before is counted by itself"


def test_where_the_words_are_all_that_was_read_the_greedy_answer_is_the_same(embedded: LoadedModel) -> None:
    graph = ChoreoGraph(system="Answer from the notes.")
    for name in ("ann", "bob"):
        graph.add_node(Agent(name, sampling=Sampling(max_tokens=12, temperature=0.0)))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility="private")
    said, ids = [], []
    for forgets in (False, True):
        with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 24), salt="s") as engine:
            app = graph.compile(InMemorySaver(), engine=engine, interrupt_before=["bob"])
            app.invoke(asked("Ann has 3 red kites. What does Ann have?"), config())
            if forgets:
                engine.threads.forget("1")
                assert not any(held(engine))
            state = app.invoke(None, config())
            said.append(state["messages"][-1].text)
            ids.append(handles(state)[0])
            assert bool(engine.stats().tokens_recomputed) == forgets
    assert said[0] == said[1] and ids[0] == ids[1]


def test_words_of_forgotten_messages_are_counted_once_as_recomputed(make_engine: MakeEngine) -> None:
    engine = make_engine(salt="s")
    app = pair_graph().compile(InMemorySaver(), engine=engine)
    first = app.invoke(asked(), config())
    engine.threads.forget("1")
    before = engine.stats()
    state = app.invoke(asked("And Bob?"), config())
    known = {message.id for message in first["messages"]}
    entries = [entry for entry in state["handles"] if entry["message_id"] in known]
    lengths = sum(entry["handle"]["length"] for entry in entries)
    prompt = MessageHandle.model_validate(first["handles"][1]["prompt"]).length
    counted = engine.stats().tokens_recomputed - before.tokens_recomputed
    assert counted == lengths + prompt
    app.invoke(asked("And Carl?"), config())
    assert engine.stats().tokens_recomputed - before.tokens_recomputed == counted


# All together


class Service:
    """Threads that run, fork, expire and are forgotten in any order, beside what a person holds."""

    def __init__(self) -> None:
        self.engine = Script(default="Fine.").load(memory=Memory(kv_budget_bytes=1 << 22), salt="s")
        self.clock, self.mine = Clock(self.engine), 0
        saver = InMemorySaver()
        self.app = pair_graph().compile(saver, engine=self.engine)
        self.halting = pair_graph().compile(saver, engine=self.engine, interrupt_before=["bob"])
        self.bare = pair_graph().compile(engine=self.engine)

    def step(self, what: str, thread: str) -> None:
        self.clock.now += 7.0
        if what == "run":
            self.app.invoke(asked(), config(thread))
        elif what == "halt":
            self.halting.invoke(asked(), config(thread))
        elif what == "go on":
            self.app.invoke(None if self.app.get_state(config(thread)).next else asked(), config(thread))
        elif what == "fork":
            values = self.app.get_state(config(thread)).values
            if values:
                self.app.update_state(config("fork"), values, as_node="bob")
                self.app.invoke(asked(), config("fork"))
        elif what == "forget":
            self.app.delete_thread(thread)
        elif what == "lose":
            self.engine.threads.forget(thread)
        elif what == "bare":
            self.bare.invoke(asked(thread))
        elif what == "hold":
            self.engine.prefill(self.engine.chat.root("Be brief."))
            self.mine += 1
        elif what == "wait":
            self.clock.now += 90.0
            self.engine.threads.expire()
        elif what == "restart":
            self.engine.admin.restart()
        self.engine.check()


STEPS = ["run", "halt", "go on", "fork", "forget", "lose", "bare", "hold", "wait", "restart"]


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(["a", "b"])), max_size=10))
def test_leases_are_accounted_for_whatever_happens(steps: list[tuple[str, str]]) -> None:
    service = Service()
    with pytest.MonkeyPatch.context() as patch, service.engine as engine:
        idle(patch, s=100.0, runs=2, messages=30)
        for what, thread in steps:
            service.step(what, thread)
        service.clock.now += 200.0
        engine.threads.expire()
        assert (engine.stats().leases, engine.stats().threads) == (service.mine, 0)
        engine.check()
