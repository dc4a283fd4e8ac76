"""What a client may ask of a service that runs a graph for many, and what it may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import CachePolicy, Command
from support.graphs import QUESTION, branches

from choreo_agents import START, Agent, ChoreoGraph, MessageHandle, RunOptions, Sampling, Schema, Synthesizer
from choreo_agents.errors import ForeignThreadError, InvalidRequestError, UnknownHandleError

HOT = Sampling(temperature=1.0, max_tokens=6, stop_tokens=())


# Options of a run


@pytest.mark.parametrize(
    "written",
    [
        {"seed": 7},
        {"seed": None},
        {"replay": {}},
        {"logits_callback": "x"},
        {"regenerate": True},
        {"choreo": {"seed": 7}},
        {"choreo": {"replay": {"ann": [5]}, "logits_callback": None}},
        {"choreo": None},
        {"choreo": RunOptions(seed=1), "replay": {}},
    ],
    ids=repr,
)
def test_what_a_client_can_write_into_configurable_is_no_option_of_a_run(
    make_engine: MakeEngine, written: dict[str, Any]
) -> None:
    app = branches(["ann"], HOT).compile(engine=make_engine())
    with pytest.raises(InvalidRequestError, match=r"choreo_agents\.RunOptions\("):
        app.invoke(QUESTION, {"configurable": written})


def test_json_carries_no_options_of_a_run(make_engine: MakeEngine) -> None:
    options = RunOptions(seed=7)
    with pytest.raises(TypeError):
        json.dumps({"choreo": options})
    app, said = branches(["ann"], HOT).compile(engine=make_engine()), set()
    for seed in (1, 2, 1, None):
        state = app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=seed)}})
        said.add((seed, state["messages"][-1].text))
    assert len(said) == 3 and len({text for _, text in said}) == 3
    for wrong in ("7", 7.0, True):
        with pytest.raises(InvalidRequestError, match="seed of a run must be an integer"):
            RunOptions(seed=wrong)  # type: ignore[arg-type]


# One compiled graph for all tenants

WHO: ContextVar[Any] = ContextVar("who")
"""What the service has authenticated."""


def of_the_service(_: RunnableConfig) -> Any:
    return WHO.get("")


def as_tenant(salt: Any, use: Callable[[], Any]) -> Any:
    """What a request of a tenant's gets."""
    context = copy_context()
    context.run(WHO.set, salt)
    return context.run(use)


def team() -> ChoreoGraph:
    return branches(["ann", "bob"], Sampling(max_tokens=3, stop_tokens=()))


def config(thread: str = "t", **more: Any) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, **more}}


def handles(state: dict[str, Any]) -> list[MessageHandle]:
    return [MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]]


def test_each_run_is_served_as_its_tenants_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = team().compile(engine=engine, tenant=of_the_service)
    first = as_tenant("acme", lambda: app.invoke(QUESTION))
    cost = engine.tenant("acme").stats().tokens_encoded
    second = as_tenant("initech", lambda: app.invoke(QUESTION))
    assert engine.stats().tokens_encoded == 0 < cost == engine.tenant("initech").stats().tokens_encoded
    assert {h.id for h in handles(first)}.isdisjoint(h.id for h in handles(second))
    for handle in handles(first):
        assert engine.tenant("acme").tokens(handle)
        for other in (engine, engine.tenant("initech")):
            with pytest.raises(UnknownHandleError):
                other.tokens(handle)
    as_tenant("acme", lambda: app.invoke(QUESTION))
    assert engine.tenant("acme").stats().tokens_encoded < 2 * cost, "what it has encoded it finds again"
    with pytest.raises(UnknownHandleError):
        app.audit(first)
    assert app.audit(first, engine=engine.tenant("acme"))


async def test_runs_of_several_tenants_at_once_are_each_ones_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = team().compile(InMemorySaver(), engine=engine, tenant=of_the_service)

    async def run(salt: str) -> dict[str, Any]:
        WHO.set(salt)
        return await app.ainvoke(QUESTION, config(f"of {salt}"))

    salts = ["a", "b", "c", "a2"]
    states = await asyncio.gather(*(asyncio.create_task(run(salt)) for salt in salts))
    for salt, state in zip(salts, states, strict=True):
        for own in salts:
            for handle in handles(state):
                assert (engine.tenant(own).kv.tiers([handle]) != [None]) == (own == salt)


@pytest.mark.parametrize(
    "written",
    [{"tenant": "acme"}, {"salt": "acme"}, {"__pregel_choreo": "acme"}, {"choreo_tenant": "acme"}],
    ids=repr,
)
def test_a_client_does_not_say_who_it_is(make_engine: MakeEngine, written: dict[str, Any]) -> None:
    engine = make_engine()
    app = team().compile(engine=engine, tenant=of_the_service)
    given: Any = {"configurable": written, "metadata": {"choreo_tenant": "acme"}, "tags": ["acme"]}
    as_tenant("initech", lambda: app.invoke(QUESTION, given))
    assert engine.tenant("acme").stats().tokens_encoded == 0 < engine.tenant("initech").stats().tokens_encoded
    for nobody in ("", None, 7, engine):
        with pytest.raises(InvalidRequestError, match="must return the salt"):
            as_tenant(nobody, lambda: app.invoke(QUESTION, given))
    with pytest.raises(InvalidRequestError, match="runs outside of its graph"):
        team().compile(engine=engine, tenant=of_the_service).builder.nodes["ann"].runnable.invoke(QUESTION)


@contextmanager
def saver(kind: str, folder: Path) -> Iterator[Any]:
    if kind == "memory":
        yield InMemorySaver()
    else:
        with SqliteSaver.from_conn_string(str(folder / "threads.sqlite")) as kept:
            yield kept


ATTACKS: dict[str, Callable[[Any], Any]] = {
    "a run": lambda app: app.invoke(QUESTION, config()),
    "a resume": lambda app: app.invoke(None, config()),
    "a command": lambda app: app.invoke(Command(update=QUESTION, goto="ann"), config()),
    "a stream": lambda app: list(app.stream(QUESTION, config())),
    "a state": lambda app: app.get_state(config()),
    "a history": lambda app: list(app.get_state_history(config())),
    "an update": lambda app: app.update_state(config(), QUESTION, as_node="__start__"),
    "a checkpoint that there is not": lambda app: app.invoke(QUESTION, config(checkpoint_id="x")),
    "a history of nothing": lambda app: list(app.get_state_history(config(checkpoint_id="x"))),
    "a state of a subgraph": lambda app: app.get_state(config(checkpoint_ns="ann")),
    "a run in a namespace": lambda app: app.invoke(QUESTION, config(checkpoint_ns="ann:1")),
    "a forged mark": lambda app: app.invoke(QUESTION, {**config(), "metadata": {"choreo_tenant": "acme"}}),
    "a forged tenant": lambda app: app.invoke(QUESTION, config(__pregel_choreo="acme")),
    "a number": lambda app: app.with_config(config()).invoke(QUESTION),
}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_thread_belongs_to_its_first_tenant(make_engine: MakeEngine, tmp_path: Path, kind: str, attack: str) -> None:
    """Also when another process, with another engine and graph, asks for it."""
    engine = make_engine()
    with saver(kind, tmp_path) as kept:
        app = team().compile(kept, engine=engine, tenant=of_the_service)
        mine = as_tenant("acme", lambda: app.invoke(QUESTION, config()))
        again = team().compile(kept, engine=make_engine(), tenant=of_the_service)
        for served in (app, again):
            with pytest.raises(ForeignThreadError, match="'t' does not belong to this tenant"):
                as_tenant("initech", lambda served=served: ATTACKS[attack](served))
        assert as_tenant("acme", lambda: app.get_state(config())).values["messages"] == mine["messages"]
        as_tenant("acme", lambda: app.update_state(config(), {"messages": [("user", "And Bob?")]}, as_node="__start__"))
        with pytest.raises(ForeignThreadError):
            as_tenant("initech", lambda: ATTACKS[attack](again))
        after = as_tenant("acme", lambda: again.invoke({"messages": [("user", "Well?")]}, config()))
        assert len(after["messages"]) > len(mine["messages"])
        assert as_tenant("initech", lambda: again.invoke(QUESTION, config("another")))


@pytest.mark.parametrize("attack", ["run", "state", "history", "update"])
async def test_a_thread_belongs_to_its_first_tenant_async(make_engine: MakeEngine, tmp_path: Path, attack: str) -> None:
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as kept:
        app = team().compile(kept, engine=make_engine(), tenant=of_the_service)
        WHO.set("acme")
        await app.ainvoke(QUESTION, config())
        WHO.set("initech")
        with pytest.raises(ForeignThreadError):
            if attack == "run":
                await app.ainvoke(QUESTION, config())
            elif attack == "state":
                await app.aget_state(config())
            elif attack == "update":
                await app.aupdate_state(config(), QUESTION, as_node="__start__")
            else:
                [_ async for _ in app.aget_state_history(config())]
        WHO.set("acme")
        assert len([_ async for _ in app.aget_state_history(config())]) > 1
        assert (await app.aget_state(config())).values["messages"]
        await app.aupdate_state(config(), QUESTION, as_node="__start__")


@pytest.mark.parametrize("asker", ["acme", "initech"])
@pytest.mark.parametrize("attack", ["run", "state", "history", "update", "forget"])
def test_attack_the_config_of_a_snapshot_names_no_tenant(make_engine: MakeEngine, asker: str, attack: str) -> None:
    """Before the thread began, a tenant asked for its state: the answer's config is no right to the thread."""
    app = team().compile(InMemorySaver(), engine=make_engine(), tenant=of_the_service)
    early = as_tenant("acme", lambda: app.get_state(config())).config
    assert "acme" not in repr(early)
    owner = {"acme": "initech", "initech": "acme"}[asker]
    mine = as_tenant(owner, lambda: app.invoke(QUESTION, config()))
    attacks = {
        "run": lambda: app.invoke(QUESTION, early),
        "state": lambda: app.get_state(early),
        "history": lambda: list(app.get_state_history(early)),
        "update": lambda: app.update_state(early, QUESTION, as_node="__start__"),
        "forget": lambda: app.delete_thread("t", early),
    }
    with pytest.raises(ForeignThreadError):
        as_tenant(asker, attacks[attack])
    assert as_tenant(owner, lambda: app.get_state(config())).values["messages"] == mine["messages"]


def test_a_thread_of_nobody_known_is_nobodys(make_engine: MakeEngine) -> None:
    """It was begun before there were tenants, or by a graph that knows none."""
    engine, kept = make_engine(), InMemorySaver()
    team().compile(kept, engine=engine).invoke(QUESTION, config())
    app = team().compile(kept, engine=engine, tenant=of_the_service)
    for use in (lambda: app.invoke(None, config()), lambda: app.get_state(config())):
        with pytest.raises(ForeignThreadError, match="does not belong"):
            as_tenant("acme", use)


async def test_two_tenants_do_not_begin_one_thread(make_engine: MakeEngine) -> None:
    app = team().compile(InMemorySaver(), engine=make_engine(), tenant=of_the_service)

    async def run(salt: str) -> Any:
        WHO.set(salt)
        return await app.ainvoke(QUESTION, config())

    done = await asyncio.gather(*(asyncio.create_task(run(s)) for s in ("a", "b", "c")), return_exceptions=True)
    assert sorted(isinstance(each, ForeignThreadError) for each in done) == [False, True, True]


OTHERS_USES: dict[str, Callable[[Any], Any]] = {
    "a run": lambda app: app.invoke(QUESTION, config()),
    "a state": lambda app: app.get_state(config()),
    "a history": lambda app: list(app.get_state_history(config())),
    "an update": lambda app: app.update_state(config(), QUESTION, as_node="__start__"),
    "forgetting": lambda app: app.delete_thread("t"),
}


@pytest.mark.parametrize("graphs", [1, 2])
@pytest.mark.parametrize("attack", OTHERS_USES)
def test_attack_a_first_run_that_has_saved_nothing_yet(make_engine: MakeEngine, attack: str, graphs: int) -> None:
    """With `durability="exit"` a thread has no checkpoint while its first run is under way: nobody else takes it
    meanwhile, through whatever graph of the same checkpointer."""
    engine, kept = make_engine(), InMemorySaver()
    app = team().compile(kept, engine=engine, tenant=of_the_service)
    other = app if graphs == 1 else team().compile(kept, engine=engine, tenant=of_the_service)
    running = as_tenant("acme", lambda: app.stream(QUESTION, config(), durability="exit"))
    as_tenant("acme", lambda: next(running))
    assert not list(kept.list(config()))
    with pytest.raises(ForeignThreadError, match="'t' does not belong to this tenant"):
        as_tenant("initech", lambda: OTHERS_USES[attack](other))
    assert as_tenant("initech", lambda: other.invoke(QUESTION, config("another")))
    as_tenant("acme", lambda: list(running))
    saved = list(kept.list(config()))
    assert len({each.metadata["choreo_tenant"] for each in saved}) == 1
    assert as_tenant("acme", lambda: other.get_state(config())).values["handles"]


async def test_attack_a_first_run_that_has_saved_nothing_yet_async(make_engine: MakeEngine) -> None:
    engine, kept = make_engine(), InMemorySaver()
    app, other = (team().compile(kept, engine=engine, tenant=of_the_service) for _ in range(2))
    WHO.set("acme")
    running = app.astream(QUESTION, config(), durability="exit")
    await anext(running)
    WHO.set("initech")
    uses: list[Callable[[], Any]] = [
        lambda: other.ainvoke(QUESTION, config()),
        lambda: other.aget_state(config()),
        lambda: other.aupdate_state(config(), QUESTION, as_node="__start__"),
        lambda: other.adelete_thread("t"),
    ]
    for use in uses:
        with pytest.raises(ForeignThreadError):
            await use()
    WHO.set("acme")
    assert [each async for each in running]
    assert (await app.aget_state(config())).values["handles"]


def test_attack_who_is_refused_a_thread_keeps_its_owner_from_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner asks while it is looked up whose the thread is, for another."""
    kept, owners = InMemorySaver(), []
    app = team().compile(kept, engine=make_engine(), tenant=of_the_service)
    as_tenant("acme", lambda: app.invoke(QUESTION, config()))
    look_up = kept.get_tuple

    def looking_up(where: RunnableConfig) -> Any:
        monkeypatch.undo()
        owners.append(as_tenant("acme", lambda: app.invoke(QUESTION, config())))
        return look_up(where)

    monkeypatch.setattr(kept, "get_tuple", looking_up)
    with pytest.raises(ForeignThreadError):
        as_tenant("initech", lambda: app.invoke(QUESTION, config()))
    assert owners[0]["messages"]


@pytest.mark.parametrize("attack", ["run", "state", "history", "update"])
def test_attack_no_thread_is_no_thread_of_all(make_engine: MakeEngine, attack: str) -> None:
    """What JSON calls null is a thread to LangGraph."""
    app = team().compile(InMemorySaver(), engine=make_engine(), tenant=of_the_service)
    nowhere: RunnableConfig = {"configurable": {"thread_id": None}}
    attacks: dict[str, Callable[[], Any]] = {
        "run": lambda: app.invoke(QUESTION, nowhere),
        "state": lambda: app.get_state(nowhere),
        "history": lambda: list(app.get_state_history(nowhere)),
        "update": lambda: app.update_state(nowhere, QUESTION, as_node="__start__"),
    }
    with pytest.raises(InvalidRequestError, match="thread_id"):
        as_tenant("acme", attacks[attack])


def calling(engine: Any, kept: Any, call: Callable[[Any, RunnableConfig], Any]) -> Any:
    """A graph in which a node of the service's calls another, of the same checkpointer."""
    inner = team().compile(kept, engine=engine, tenant=of_the_service)

    def node(_: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        call(inner, config)
        return {}

    graph = team().add_node("caller", node).add_edge(START, "caller")
    return graph.compile(kept, engine=engine, tenant=of_the_service)


STOLEN: dict[str, Callable[[Any, RunnableConfig], Any]] = {
    "a run": lambda app, own: app.invoke(QUESTION, own),
    "a state": lambda app, own: app.get_state(own),
    "an update": lambda app, own: app.update_state(own, QUESTION, as_node="__start__"),
    "forgetting": lambda app, own: app.delete_thread("t", own),
}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("attack", STOLEN)
def test_attack_a_nodes_config_is_no_right_to_another_thread(make_engine: MakeEngine, attack: str, begun: bool) -> None:
    """A node puts a thread that its client has named into the config that it hands on."""
    engine, kept = make_engine(), InMemorySaver()
    app = team().compile(kept, engine=engine, tenant=of_the_service)
    if begun:
        as_tenant("acme", lambda: app.invoke(QUESTION, config()))
    before = [each.config for each in kept.list(config())]

    def steal(inner: Any, own: RunnableConfig) -> None:
        STOLEN[attack](inner, {**own, "configurable": {**own["configurable"], "thread_id": "t"}})

    with pytest.raises(InvalidRequestError, match="'t' is not the thread of the enclosing run"):
        as_tenant("initech", lambda: calling(engine, kept, steal).invoke(QUESTION, config("own")))
    assert [each.config for each in kept.list(config())] == before
    assert as_tenant("acme", lambda: app.invoke(QUESTION, config()))["messages"]


@pytest.mark.parametrize("attack", STOLEN)
def test_attack_a_run_that_keeps_nothing_has_a_thread_of_that_name(make_engine: MakeEngine, attack: str) -> None:
    """So it is not known to be the tenant's, in what another graph keeps."""
    engine, kept = make_engine(), InMemorySaver()
    inner = team().compile(kept, engine=engine, tenant=of_the_service)
    as_tenant("acme", lambda: inner.invoke(QUESTION, config()))
    before = [each.config for each in kept.list(config())]

    def steal(_: Any, config: RunnableConfig) -> None:
        STOLEN[attack](inner, config)

    outer = ChoreoGraph().add_node("steal", steal).add_edge(START, "steal")
    app = outer.compile(engine=engine, tenant=of_the_service)
    with pytest.raises(ForeignThreadError):
        as_tenant("initech", lambda: app.invoke(QUESTION, config()))
    assert [each.config for each in kept.list(config())] == before


@pytest.mark.parametrize("thread", [0, False, "", None])
def test_attack_a_thread_without_a_name_is_none(make_engine: MakeEngine, thread: Any) -> None:
    """LangGraph keeps some of them under two names, and none of these says whose it is."""
    app = team().compile(InMemorySaver(), engine=make_engine(), tenant=of_the_service)
    for use in (lambda: app.invoke(QUESTION, config(thread)), lambda: app.get_state(config(thread))):
        with pytest.raises(InvalidRequestError, match="thread_id"):
            as_tenant("acme", use)


def test_threads_are_kept_apart_whatever_keeps_them(make_engine: MakeEngine) -> None:
    @dataclass
    class Saver(InMemorySaver):
        """Has no hash, as it has fields."""

        def __post_init__(self) -> None:
            super().__init__()

    app = team().compile(Saver(), engine=make_engine(), tenant=of_the_service)
    as_tenant("acme", lambda: app.invoke(QUESTION, config()))
    with pytest.raises(ForeignThreadError):
        as_tenant("initech", lambda: app.invoke(QUESTION, config()))


def test_a_node_calls_a_graph_in_its_own_thread_or_in_another_of_its_tenants(make_engine: MakeEngine) -> None:
    engine, said = make_engine(), []

    def call(inner: Any, own: RunnableConfig) -> None:
        said.append(inner.invoke(QUESTION, own))
        said.append(inner.invoke(QUESTION, config("another")))

    app = calling(engine, InMemorySaver(), call)
    as_tenant("acme", lambda: app.invoke(QUESTION, config()))
    assert all(engine.tenant("acme").tokens(handle) for state in said for handle in handles(state))
    assert as_tenant("acme", lambda: app.get_state(config("another"))).values["messages"]
    with pytest.raises(ForeignThreadError):
        as_tenant("initech", lambda: app.invoke(QUESTION, config()))
    assert len(said) == 2


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_config_that_is_given_out_carries_a_tenant(make_engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    with saver(kind, tmp_path) as kept:
        app = team().compile(kept, engine=make_engine(), tenant=of_the_service)
        told = [as_tenant("acme", lambda: app.get_state(config())).config]
        told.append(as_tenant("acme", lambda: app.update_state(config(), QUESTION, as_node="__start__")))
        modes: Any = ["checkpoints", "debug", "tasks"]
        parts = as_tenant("acme", lambda: list(app.stream(QUESTION, config(), stream_mode=modes)))
        history = as_tenant("acme", lambda: list(app.get_state_history(config())))
        told += [each.config for each in history]
        assert len(told) > 3 and parts
        assert "RunTenant" not in repr((told, parts)) and "choreo_tenant" not in repr(told)


async def test_the_resolver_is_asked_once_for_each_use(make_engine: MakeEngine, tmp_path: Path) -> None:
    asked: list[RunnableConfig] = []

    def resolver(given: RunnableConfig) -> str:
        asked.append(given)
        return "acme"

    engine = make_engine()
    inner = team().compile(engine=engine, tenant=resolver)
    app = (
        ChoreoGraph()
        .add_node("team", inner)
        .add_edge(START, "team")
        .compile(InMemorySaver(), engine=engine, tenant=resolver)
    )
    state = app.invoke(QUESTION, config())
    assert len(asked) == 1, "a subgraph is served for whom its graph is"
    uses: list[Callable[[], Any]] = [
        lambda: app.invoke(state, config()),
        lambda: list(app.stream(state, config())),
        lambda: app.get_state(config()),
        lambda: list(app.get_state_history(config())),
        lambda: app.update_state(config(), QUESTION, as_node="__start__"),
        lambda: app.delete_thread("t"),
    ]
    for number, use in enumerate(uses, 2):
        use()
        assert len(asked) == number
    asked.clear()
    async_uses: list[Callable[[], Any]] = [
        lambda: app.ainvoke(QUESTION, config()),
        lambda: app.ainvoke(state, config()),
        lambda: app.aget_state(config()),
        lambda: app.aupdate_state(config(), QUESTION, as_node="__start__"),
        lambda: app.adelete_thread("t"),
    ]
    for number, use in enumerate(async_uses, 1):
        await use()
        assert len(asked) == number
    with engine.tenant("acme").record(tmp_path / "run.jsonl"):
        app.invoke(QUESTION, config())
        await app.ainvoke(QUESTION, config())
    assert len(asked) == len(async_uses) + 2, "also while it is recorded"


def test_modules_are_each_tenants_own(make_engine: MakeEngine) -> None:
    schema = Schema.from_text("<schema name='s'><module name='m'>Ann has 3 red kites and 2 boats.</module></schema>")
    short = Sampling(max_tokens=3, stop_tokens=())
    graph = ChoreoGraph(system="Root.").add_node(Agent("ann", prompt=schema.prompt("<m/>"), sampling=short))
    graph.add_node(Agent("bob", sampling=short)).add_edge(START, "ann").add_edge(START, "bob")
    graph.add_node(Synthesizer("editor", merges=["ann", "bob"], sampling=short))
    graph.add_edge(["ann", "bob"], "editor")
    engine = make_engine()
    app = graph.compile(engine=engine, tenant=of_the_service)
    costs = []
    for salt in ("acme", "initech", "acme"):
        before = engine.tenant(salt).stats().tokens_encoded
        state = as_tenant(salt, lambda: app.invoke(QUESTION))
        assert state["messages"][-1].name == "editor"
        costs.append(engine.tenant(salt).stats().tokens_encoded - before)
    assert costs[2] < min(costs[:2]) and engine.stats().messages == 0
    engine.tenant("acme").close()
    assert as_tenant("acme", lambda: app.invoke(QUESTION))["messages"][-1].name == "editor"


def test_a_subgraph_serves_who_its_graph_serves(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def outer(inner: Any) -> ChoreoGraph:
        return ChoreoGraph().add_node("team", inner).add_edge(START, "team")

    with pytest.raises(InvalidRequestError, match="is in a subgraph that serves one tenant"):
        outer(team().compile(engine=engine)).compile(engine=engine, tenant=of_the_service)
    app = outer(team().compile(engine=engine, tenant=lambda _: "nobody")).compile(
        InMemorySaver(), engine=engine, tenant=of_the_service
    )
    state = as_tenant("acme", lambda: app.invoke(QUESTION, config()))
    assert all(engine.tenant("acme").tokens(handle) for handle in handles(state))
    assert engine.stats().tokens_encoded == engine.tenant("nobody").stats().tokens_encoded == 0


def test_what_is_cached_for_all_is_no_tenants(make_engine: MakeEngine) -> None:
    graph = ChoreoGraph().add_node(Agent("ann"), cache_policy=CachePolicy()).add_edge(START, "ann")
    with pytest.raises(InvalidRequestError, match="shared by all runs"):
        graph.compile(engine=make_engine(), tenant=of_the_service, cache=InMemoryCache())
