"""Synthesizers that start before all their branches are in, and see the others while they speak."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import CachePolicy, Overwrite, RetryPolicy, TimeoutPolicy, interrupt
from pydantic import BaseModel
from support.adapters import save_mapper
from support.graphs import QUESTION

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Command,
    Engine,
    MessageHandle,
    Policy,
    RunOptions,
    Sampling,
    Send,
    Synthesizer,
    Worker,
)
from choreo_agents.errors import InvalidRequestError, QuorumError, VisibilityError
from choreo_agents.graph.state import merge_entries
from choreo_agents.synthesis.boundaries import MergingConfig, write_merging

SHORT = Sampling(max_tokens=10, stop_tokens=())
LONG = Sampling(max_tokens=150, stop_tokens=())


class Held:
    """Branches that wait until the synthesizer has said a few tokens, or somebody lets them go."""

    def __init__(self, tokens: int | None = 5) -> None:
        self.open = threading.Event()
        self._tokens = tokens
        self.said = 0

    async def prompt(self, _: Any) -> str:
        deadline = time.monotonic() + 20
        while not self.open.is_set():
            assert time.monotonic() < deadline, "nobody let it go"
            await asyncio.sleep(0.001)
        return "Now you."

    def watch(self, author: str, *_: Any) -> Callable[[Any], None] | None:
        if author.rpartition("|")[2] != "editor":
            return None

        def count(_: Any) -> None:
            self.said += 1
            if self.said == self._tokens:
                self.open.set()

        return count

    def config(self, **more: Any) -> RunnableConfig:
        return {"configurable": {"choreo": RunOptions(watch=self.watch), **more}}


def editor(*sources: str, **options: Any) -> Synthesizer:
    given: dict[str, Any] = {"merges": sources or ("a", "b", "c"), "quorum": 2, "sampling": LONG} | options
    return Synthesizer("editor", **given)


def team(held: Held | None, *, reader: Synthesizer | None = None, slow: str = "b", **options: Any) -> ChoreoGraph:
    """Three branches, one of which is held, and their editor."""
    graph = ChoreoGraph(system="Root.", **options)
    for name in "abc":
        prompt = held.prompt if held is not None and name == slow else "Go."
        graph.add_node(Agent(name, prompt=prompt, sampling=SHORT))
        graph.add_edge(START, name)
    graph.add_node(reader or editor())
    for name in "abc":
        graph.add_edge(name, "editor")
    graph.add_edge("editor", END)
    return graph


def run(app: Any, given: Any, config: Any, *, sync: bool) -> Any:
    return app.invoke(given, config) if sync else asyncio.run(app.ainvoke(given, config))


def handle(state: Any, author: str, last: bool = False) -> MessageHandle:
    found = [MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["author"] == author]
    assert last or len(found) == 1
    return found[-1]


def branches(state: Any) -> dict[str, int]:
    """Since when the editor saw each branch, as its message says."""
    authors = {entry["message_id"]: entry["author"] for entry in state["handles"]}
    seen = state["messages"][-1].response_metadata["choreo"]["branches"]
    return {authors[each["message_id"]]: each["since"] for each in seen}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_it_speaks_before_the_slow_one_is_done_and_sees_it_then(engine: Engine, strategy: str, sync: bool) -> None:
    held = Held()
    app = team(held, reader=editor(strategy=strategy)).compile(engine=engine)
    state = run(app, QUESTION, held.config(), sync=sync)
    made, late = handle(state, "editor"), handle(state, "b")
    header = len(engine.model.encode(engine.chat.header("editor")))
    [(joined, since)] = engine.inspect.joined(made).items()
    assert joined == late and header + 4 < since < header + 150
    assert {handle(state, "a"), handle(state, "c"), late} <= engine.inspect.ancestors(made).keys()
    assert branches(state) == {"a": 0, "c": 0, "b": since}
    supersteps = {entry["author"]: entry["superstep"] for entry in state["handles"]}
    assert supersteps["editor"] > supersteps["a"] == supersteps["b"] == supersteps["c"]
    assert [message.name for message in state["messages"]][1:] == ["a", "b", "c", "editor"]
    view = engine.inspect.records([made])[-1].parents
    assert state["messages"][-1].usage_metadata["input_tokens"] == sum(each.length for each in view) + header


def test_a_stream_shows_it_before_the_slow_one(engine: Engine) -> None:
    held, names = Held(tokens=None), list[str]()
    for chunk, _ in team(held).compile(engine=engine).stream(QUESTION, stream_mode="messages"):
        if chunk.name not in names:
            names.append(chunk.name)
        if names.count("editor"):
            held.open.set()
    assert names.index("editor") < names.index("b")


def test_late_ones_stand_where_the_others_do_if_there_is_room(engine: Engine) -> None:
    held = Held()
    state = team(held, reader=editor(strategy="parallel")).compile(engine=engine).invoke(QUESTION, held.config())
    made = engine.inspect.records([handle(state, "editor")])[-1]
    at = dict(zip(made.parents, made.offsets, strict=True))
    assert at[handle(state, "b")] == at[handle(state, "a")] == at[handle(state, "c")]


@pytest.mark.parametrize("asked", [None, "Merge."])
def test_longer_ones_end_where_its_own_turn_begins(engine: Engine, asked: str | None) -> None:
    held = Held()
    graph = team(held, reader=editor(strategy="parallel", prompt=asked))
    graph.nodes["b"].runnable.sampling = Sampling(max_tokens=14, stop_tokens=())
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    made = engine.inspect.records([handle(state, "editor")])[-1]
    at, late, first = dict(zip(made.parents, made.offsets, strict=True)), handle(state, "b"), handle(state, "a")
    own = max(at[each] + each.length for each in (first, handle(state, "c")))
    assert late.length > first.length and at[late] + late.length == own
    turn = 0 if asked is None else len(engine.model.encode(engine.chat.turn("user", asked)))
    assert made.new_offset == own + turn


def test_one_after_the_other_there_is_room_for_those_that_are_out(engine: Engine) -> None:
    held = Held()
    state = team(held, reader=editor(quorum=1)).compile(engine=engine).invoke(QUESTION, held.config())
    made = engine.inspect.records([handle(state, "editor")])[-1]
    at = dict(zip(made.parents, made.offsets, strict=True))
    spans = sorted((at[each], at[each] + each.length) for each in (handle(state, name) for name in "abc"))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= made.new_offset


def test_room_is_left_only_where_the_context_has_it(engine: Engine) -> None:
    held = Held()
    graph = team(held, reader=editor(quorum=1, sampling=Sampling(max_tokens=20, stop_tokens=())))
    short = Sampling(max_tokens=700, stop_tokens=tuple(range(engine.model.adapter.vocabulary_size)))
    for name in "bc":
        graph.nodes[name].runnable.prompt, graph.nodes[name].runnable.sampling = held.prompt, short
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    made = engine.inspect.records([handle(state, "editor")])[-1]
    assert made.new_offset + made.handle.length == engine.model.adapter.max_positions
    assert branches(state).keys() == {*"abc"}


@pytest.mark.parametrize("told", [None, "The other honourable representative, of the southern provinces"])
def test_there_is_room_for_the_names_that_branches_speak_under(engine: Engine, told: str | None) -> None:
    held = Held()
    speaker = None if told else "The honourable representative of the northern provinces"
    worker = Worker("worker", prompt=held.prompt, speaker=speaker, sampling=SHORT)
    graph = ChoreoGraph()
    graph.add_node(worker)
    graph.add_node(editor("worker", quorum=1))
    graph.add_conditional_edges(
        START,
        lambda s: [worker.send(s, "Go."), worker.send(s, speaker=told), worker.send(s, speaker=told)],
        ["worker"],
    )
    graph.add_edge("worker", "editor")
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    made = engine.inspect.records([handle(state, "editor")])[-1]
    said = {MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["author"] == "worker"}
    view = zip(made.parents, made.offsets, strict=True)
    spans = sorted((at, at + each.length) for each, at in view if each in said)
    assert len(spans) == 3 and spans[-1][1] <= made.new_offset
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_a_late_branch_of_its_own_persona_stands_in_front_of_its_turn(engine: Engine, strategy: str) -> None:
    held = Held()
    graph = team(held, reader=editor(persona="ann", strategy=strategy))
    graph.nodes["a"].runnable.sampling = Sampling(max_tokens=60, stop_tokens=())
    graph.nodes["b"].runnable.persona = "ann"
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    made, late = engine.inspect.records([handle(state, "editor")])[-1], handle(state, "b")
    at = dict(zip(made.parents, made.offsets, strict=True))
    [asked] = [MessageHandle.model_validate(e["prompt"]) for e in state["handles"] if e["author"] == "b"]
    assert at[asked] + asked.length == at[late] and at[late] + late.length <= made.new_offset
    assert (
        branches(state).keys() == {*"abc"} and len(state["messages"][-1].response_metadata["choreo"]["branches"]) == 3
    )


def test_what_came_before_its_first_token_is_told_too(engine: Engine) -> None:
    graph, open_ = team(None), threading.Event()

    async def asked(_: Any) -> str:
        while not open_.is_set():
            await asyncio.sleep(0.001)
        return "Now you."

    async def waits(state: Any) -> str:
        open_.set()
        while not any(message.author == "b" and message.chosen for message in engine._core.table.messages()):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        return "Merge."

    graph.nodes["b"].runnable.prompt, graph.nodes["editor"].runnable.prompt = asked, waits
    app = graph.compile(engine=engine)
    for _ in range(4):
        open_.clear()
        with engine.scope():
            state = app.invoke(QUESTION)
            made = engine.inspect.records([handle(state, "editor")])[-1]
            assert made.parents[-1] == handle(state, "b") and branches(state)["b"] == made.since[-1]
            counted = state["messages"][-1].usage_metadata["input_tokens"]
            assert counted == sum(each.length for each in made.parents) + made.sampled[0]


def test_it_tells_of_what_stands_in_its_view_alone(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, held = make_engine(), Held()
    engine.load_adapter(save_mapper(tmp_path / "mapper", engine.model), "merger")
    graph = team(held, reader=editor(merges={"a": "shared", "b": "shared", "c": "private"}, adapter="merger"))
    graph.edges -= {(name, "editor") for name in "abc"}
    for name in "abc":
        graph.add_edge(name, "editor", visibility={})
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    in_view = {parent.id for parent in engine.inspect.records([handle(state, "editor")])[-1].parents}
    told = state["messages"][-1].response_metadata["choreo"]["branches"]
    assert branches(state).keys() == {"a", "b"} and {each["handle"] for each in told} <= in_view


def test_with_all_branches_in_nothing_is_different(make_engine: MakeEngine) -> None:
    made = []
    for quorum in (None, 3, 7):
        engine = make_engine(salt="s")
        app = team(None, reader=editor(quorum=quorum, strategy="parallel", sampling=SHORT)).compile(engine=engine)
        state = app.invoke(QUESTION)
        made.append([handle(state, name) for name in ("a", "b", "c", "editor")])
        if quorum:
            assert branches(state) == dict.fromkeys("abc", 0)
        else:
            assert "branches" not in state["messages"][-1].response_metadata["choreo"]
    assert made[0] == made[1] == made[2]


class Reported(ChoreoState):
    report: str


@pytest.mark.parametrize("overwrites", [False, True])
def test_what_it_writes_beside_its_message_is_its_own(engine: Engine, overwrites: bool) -> None:
    def alone(said: AIMessage, state: Any) -> dict[str, Any]:
        return {"messages": Overwrite([state["messages"][0], said])} if overwrites else {}

    reader = editor(quorum=3, sampling=SHORT, writes="report", update=alone)
    state = team(None, reader=reader, state_schema=Reported).compile(engine=engine).invoke(QUESTION)
    assert state["report"] == state["messages"][-1].text
    names = ["a", "b", "c", "editor"]
    assert [message.name for message in state["messages"]] == [None, *(names[3:] if overwrites else names)]


def test_without_a_quorum_edges_stay_as_they_are(engine: Engine) -> None:
    graph = team(None, reader=editor(quorum=None))
    app = graph.compile(engine=engine)
    assert app.builder.edges == graph.edges and not app.builder.branches
    with_quorum = team(None)
    edges = set(with_quorum.edges)
    with_quorum.compile(engine=engine)
    assert with_quorum.edges == edges and not with_quorum.branches, "the graph itself is not changed"


@pytest.mark.parametrize("sync", [True, False])
def test_after_its_deadline_one_branch_is_enough(engine: Engine, sync: bool) -> None:
    held = Held()
    app = team(held, reader=editor(quorum=3, deadline_s=0.3)).compile(engine=engine)
    started = time.monotonic()
    state = run(app, QUESTION, held.config(), sync=sync)
    assert time.monotonic() - started >= 0.3 and branches(state)["b"] > 0 == branches(state)["a"]


def test_after_its_deadline_it_still_waits_for_the_first(engine: Engine) -> None:
    held = Held(tokens=None)
    graph = ChoreoGraph()
    graph.add_node(Agent("a", prompt=held.prompt, sampling=SHORT))
    graph.add_node(editor("a", quorum=1, deadline_s=0.0, sampling=SHORT))
    graph.add_edge(START, "a")
    graph.add_edge("a", "editor")
    threading.Timer(0.2, held.open.set).start()
    assert branches(graph.compile(engine=engine).invoke(QUESTION)) == {"a": 0}


def test_who_comes_after_its_end_is_in_the_state_only(engine: Engine) -> None:
    held = Held(tokens=6)
    app = team(held, reader=editor(sampling=Sampling(max_tokens=6, stop_tokens=()))).compile(engine=engine)
    state = app.invoke(QUESTION, held.config())
    assert handle(state, "b") not in engine.inspect.ancestors(handle(state, "editor")) and branches(state) == {
        "a": 0,
        "c": 0,
    }
    assert state["messages"][-1].name == "editor"


def sent(worker: Worker, told: list[str]) -> Callable[[Any], list[Send]]:
    return lambda state: [worker.send(state, text) for text in told]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_instances_are_counted_by_their_sends(engine: Engine, sync: bool, n: int) -> None:
    held = Held()

    async def asked(state: Any) -> str:
        return await held.prompt(state)

    worker = Worker("worker", prompt=asked, sampling=SHORT, n=n)
    graph = ChoreoGraph(system="Root.")
    graph.add_node(worker)
    graph.add_node(editor("worker", quorum=2, strategy="parallel"))
    told: list[Any] = ["One.", None, "Three."]
    graph.add_conditional_edges(START, sent(worker, told), ["worker"])
    graph.add_edge("worker", "editor")
    state = run(graph.compile(engine=engine), QUESTION, held.config(), sync=sync)
    entries = [entry for entry in state["handles"] if entry["author"] == "worker"]
    late = [MessageHandle.model_validate(entry["handle"]) for entry in entries if entry["branch"] == 1]
    made = handle(state, "editor")
    assert len(entries) == 3 * n and len(late) == n and engine.inspect.joined(made).keys() == {*late}
    assert state["messages"][-1].name == "editor"


def test_a_route_that_starts_no_branch_starts_no_editor(engine: Engine) -> None:
    graph = team(None, reader=editor(quorum=3))
    graph.edges = {edge for edge in graph.edges if edge[0] != START}
    told: list[Any] = [END]
    graph.add_conditional_edges(START, lambda _: told, ["a", "b", "c", END])
    app = graph.compile(engine=engine)
    assert [message.name for message in app.invoke(QUESTION)["messages"]] == [None]
    told[:] = ["a", "c"]
    assert branches(app.invoke(QUESTION)) == {"a": 0, "c": 0}, "it waits for those that run"


def test_it_is_started_by_lists_of_nodes_too_and_by_several_nodes_once(engine: Engine) -> None:
    for starts in (["p", "q"], "p q"):
        graph = ChoreoGraph()
        for name in "pqab":
            graph.add_node(Agent(name, sampling=SHORT))
        graph.add_node(editor("a", "b", sampling=SHORT))
        for name in "pq":
            graph.add_edge(START, name)
        for name in "ab":
            for start in [starts] if isinstance(starts, list) else starts.split():
                graph.add_edge(start, name)
        graph.add_edge(["a", "b"], "editor")
        state = graph.compile(engine=engine).invoke(QUESTION)
        names = sorted(message.name for message in state["messages"][1:])
        assert names == ["a", "b", "editor", "p", "q"]


def test_it_speaks_again_in_each_round_of_a_loop(engine: Engine) -> None:
    held = Held(tokens=None)
    held.open.set()
    graph = team(held, reader=editor(sampling=SHORT))
    graph.edges.discard(("editor", END))
    again = lambda state: ["a", "b", "c"] if sum(m.name == "editor" for m in state["messages"]) < 2 else END  # noqa: E731
    graph.add_conditional_edges("editor", again, ["a", "b", "c", END])
    state = graph.compile(engine=engine).invoke(QUESTION)
    names = [message.name for message in state["messages"][1:]]
    assert sorted(names) == sorted(["a", "b", "c", "editor"] * 2) and names[-1] == "editor"
    supersteps = [entry["superstep"] for entry in state["handles"] if entry["author"] == "editor"]
    assert supersteps == [2, 4]


@pytest.mark.parametrize("method", ["choreo", "baseline"])
def test_it_stands_behind_a_late_branch_that_was_sent_more(make_engine: MakeEngine, method: str) -> None:
    """Words of several people that one instance was sent put what it says further back."""
    engine, held = make_engine(method=method), Held()
    worker = Worker("worker", prompt=held.prompt, sampling=SHORT)
    graph = ChoreoGraph()
    for name in "xyz":
        graph.add_node(name, lambda _: {"messages": [AIMessage("One.")]})
    graph.add_node(worker)
    graph.add_node(editor("worker", quorum=1))

    def route(state: Any) -> list[Send]:
        return [worker.send({**state, "messages": state["messages"][:1]}, "Go."), worker.send(state)]

    graph.add_edge(START, "x").add_edge("x", "y").add_edge("y", "z")
    graph.add_conditional_edges("z", route, ["worker"])
    graph.add_edge("worker", "editor")
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    said = {(entry["author"], entry["branch"]): entry["superstep"] for entry in state["handles"]}
    assert said["worker", 1] > said["worker", 0] and said["worker", 1] < said["editor", 2]
    assert len(engine.inspect.joined(handle(state, "editor"))) == (method == "choreo")


def test_two_editors_of_one_superstep_each_wait_for_their_own(engine: Engine) -> None:
    held = Held()
    graph = team(held, reader=editor("a", "b"))
    graph.edges -= {("c", "editor")}
    graph.add_node(Synthesizer("other", merges=["a", "c"], quorum=2, sampling=SHORT))
    for name in "ac":
        graph.add_edge(name, "other")
    graph.nodes["editor"].runnable.quorum = 1
    state = graph.compile(engine=engine).invoke(QUESTION, held.config())
    seen = {author: engine.inspect.ancestors(handle(state, author)).keys() for author in ("editor", "other")}
    sees = {author: {name for name in "abc" if handle(state, name) in seen[author]} for author in seen}
    assert sees == {"editor": {"a", "b"}, "other": {"a", "c"}}


def test_a_route_behind_it_sees_what_it_has_seen(engine: Engine) -> None:
    held, seen = Held(), list[list[str | None]]()
    graph = team(held)
    graph.edges.discard(("editor", END))
    graph.add_conditional_edges("editor", lambda state: seen.append([m.name for m in state["messages"]]) or END, [END])
    graph.compile(engine=engine).invoke(QUESTION, held.config())
    assert seen == [[None, "a", "b", "c", "editor"]]


class Notes(BaseModel):
    """State of another kind."""

    handles: Annotated[list[Any], merge_entries] = []
    messages: Annotated[list[Any], add_messages] = []


def test_state_may_be_a_model(engine: Engine) -> None:
    held, asked = Held(), list[type]()
    reader = editor(prompt=lambda state: asked.append(type(state)) or "Merge.")
    state = team(held, reader=reader, state_schema=Notes).compile(engine=engine).invoke(QUESTION, held.config())
    assert asked == [Notes] and branches(state)["b"] > 0


@pytest.mark.parametrize("sync", [True, False])
def test_a_branch_that_fails_keeps_nobody_waiting(engine: Engine, sync: bool) -> None:
    def fails(_: Any) -> str:
        raise ArithmeticError("this branch cannot")

    graph = team(None, reader=editor(quorum=3))
    graph.nodes["b"].runnable.prompt = fails
    with pytest.raises(ArithmeticError):
        run(graph.compile(engine=engine), QUESTION, {}, sync=sync)
    deadline = time.monotonic() + 20
    while engine.stats().unfinished:
        assert time.monotonic() < deadline


def test_a_failure_that_is_handled_elsewhere_is_told(engine: Engine) -> None:
    def fails(_: Any) -> str:
        raise ArithmeticError("this branch cannot")

    graph = team(None, reader=editor(quorum=3))
    graph.nodes.pop("b")
    graph.add_node(Agent("b", prompt=fails, sampling=SHORT), error_handler=lambda _: {})
    with pytest.raises(QuorumError, match="waits for 3 of 3 branches, and 1 of them have failed"):
        graph.compile(engine=engine).invoke(QUESTION)
    graph.nodes["editor"].runnable.deadline_s = 60.0
    started = time.monotonic()
    assert branches(graph.compile(engine=engine).invoke(QUESTION)) == {"a": 0, "c": 0}
    assert time.monotonic() - started < 30, "nobody else can come: it does not wait for its deadline"
    for name in "ac":
        graph.nodes.pop(name)
        graph.add_node(Agent(name, prompt=fails, sampling=SHORT), error_handler=lambda _: {})
    with pytest.raises(QuorumError, match="3 of them have failed"):
        graph.compile(engine=engine).invoke(QUESTION)


@pytest.mark.parametrize("sync", [True, False])
def test_a_branch_that_is_tried_again_counts(engine: Engine, sync: bool) -> None:
    left = [1]

    def fails_once(_: Any) -> str:
        if left[0]:
            left[0] -= 1
            raise ArithmeticError("not yet")
        return "Go."

    graph = team(None, reader=editor(quorum=3, sampling=SHORT))
    graph.nodes["b"].runnable.prompt = fails_once
    graph.nodes["b"].retry_policy = RetryPolicy(initial_interval=0.01, retry_on=ArithmeticError)
    state = run(graph.compile(engine=engine), QUESTION, {}, sync=sync)
    assert branches(state) == dict.fromkeys("abc", 0)


@pytest.mark.parametrize("policy", [1.0, TimeoutPolicy(idle_timeout=1.0)])
async def test_a_branch_that_took_too_long_and_is_tried_again_counts(engine: Engine, policy: Any) -> None:
    tries = itertools.count()

    async def slow_once(_: Any) -> str:
        await asyncio.sleep(0 if next(tries) else 20)
        return "Go."

    graph = team(None, reader=editor(quorum=3, sampling=SHORT))
    del graph.nodes["b"]
    graph.add_node(
        Agent("b", prompt=slow_once, sampling=SHORT), timeout=policy, retry_policy=RetryPolicy(initial_interval=0.01)
    )
    state = await graph.compile(engine=engine).ainvoke(QUESTION)
    assert branches(state) == dict.fromkeys("abc", 0) and next(tries) >= 2  # a slow machine may need more


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("sync", [True, False])
def test_after_an_interrupt_it_sees_what_was_said_before(make_engine: MakeEngine, sync: bool, elsewhere: bool) -> None:
    def asks(_: Any) -> str:
        return str(interrupt("What now?"))

    graph = team(None, reader=editor(quorum=3, sampling=SHORT))
    graph.nodes["b"].runnable.prompt = asks
    saver, engine = InMemorySaver(), make_engine(salt="s")
    app = graph.compile(saver, engine=engine)
    stopped = run(app, QUESTION, {"configurable": {"thread_id": "t"}}, sync=sync)
    assert "__interrupt__" in stopped and "editor" not in [m.name for m in stopped["messages"]]
    if elsewhere:
        engine = make_engine(salt="s")
        app = graph.compile(saver, engine=engine)
    state = run(app, Command(resume="Go on."), {"configurable": {"thread_id": "t"}}, sync=sync)
    assert sorted(branches(state).values()) == [0, 0, 0]
    assert [message.name for message in state["messages"][1:]] == ["a", "b", "c", "editor"]
    assert len(engine.inspect.ancestors(handle(state, "editor"))) >= 4


def test_interrupted_before_quorum_is_of_no_concern_the_run_goes_on(engine: Engine) -> None:
    def asks(_: Any) -> str:
        return str(interrupt("What now?"))

    graph = team(None, reader=editor(quorum=2, sampling=SHORT))
    graph.nodes["b"].runnable.prompt = asks
    app = graph.compile(InMemorySaver(), engine=engine)
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    app.invoke(QUESTION, config)
    state = app.invoke(Command(resume="Go on."), config)
    assert branches(state) == {"a": 0, "c": 0} and handle(state, "b") not in engine.inspect.ancestors(
        handle(state, "editor")
    )


def asks_in_second_round(state: Any) -> str:
    return str(interrupt("What now?")) if any(m.name == "editor" for m in state["messages"]) else "Go."


@pytest.mark.parametrize("beside", ["another editor", "a subgraph"])
def test_after_an_interrupt_what_others_hand_on_is_no_branch(engine: Engine, beside: str) -> None:
    graph, others = ChoreoGraph(system="Root."), list[str]()
    for name in "ab":
        graph.add_node(Agent(name, prompt=asks_in_second_round if name == "b" else "Go.", sampling=SHORT))
    graph.add_node(editor("a", "b", strategy="parallel", sampling=SHORT))
    if beside == "another editor":
        graph.add_node(Synthesizer("early", merges=["a", "b"], quorum=1, sampling=SHORT))
    else:
        inner = ChoreoGraph()
        inner.add_node(Agent("x", sampling=SHORT))
        inner.add_edge(START, "x")
        graph.add_node("team", inner.compile(engine=engine))
        others.append("team")
    for name in "ab":
        graph.add_edge(START, name)
        graph.add_edge(name, "editor")
        if not others:
            graph.add_edge(name, "early")
    again = lambda state: ["a", "b", *others] if sum(m.name == "editor" for m in state["messages"]) < 2 else END  # noqa: E731
    graph.add_conditional_edges("editor", again, ["a", "b", *others, END])
    app, config = graph.compile(InMemorySaver(), engine=engine), RunnableConfig(configurable={"thread_id": "t"})
    assert "__interrupt__" in app.invoke(QUESTION, config)
    state = app.invoke(Command(resume="Go on."), config)
    assert handle(state, "b", last=True) in engine.inspect.ancestors(handle(state, "editor", last=True))


async def test_a_cancelled_run_leaves_nothing_behind(engine: Engine) -> None:
    held = Held(tokens=None)
    task = asyncio.create_task(team(held).compile(engine=engine).ainvoke(QUESTION, held.config()))
    while held.said < 3:
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while engine.stats().unfinished:
        await asyncio.sleep(0.002)
    engine.check()
    said = {message.author: message.leases for message in engine._core.table.messages() if message.chosen}
    assert said == {"a": 1, "c": 1}, "what was said is in its checkpoint, what was begun is nowhere"


def test_runs_at_once_do_not_mix(engine: Engine) -> None:
    held = [Held() for _ in range(3)]

    async def asked(state: Any) -> str:
        return await held[int(state["messages"][0].text)].prompt(state)

    graph = team(None)
    graph.nodes["b"].runnable.prompt = asked
    app = graph.compile(engine=engine)
    results: dict[int, Any] = {}

    def one(number: int) -> None:
        given = {"messages": [("user", str(number))]}
        results[number] = run(app, given, held[number].config(), sync=number == 0)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(3):
        seen = engine.inspect.ancestors(handle(results[number], "editor"))
        assert branches(results[number]).keys() == {*"abc"}
        assert not any(handle(results[other], name) in seen for other in range(3) if other != number for name in "abc")


def test_a_late_branch_is_mapped_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, held = make_engine(), Held()
    engine.load_adapter(save_mapper(tmp_path / "mapper", engine.model), "merger")
    state = team(held, reader=editor(adapter="merger")).compile(engine=engine).invoke(QUESTION, held.config())
    [late] = engine.inspect.joined(handle(state, "editor"))
    assert "~" in late.model and engine.tokens(late) == engine.tokens(handle(state, "b"))
    assert branches(state)["b"] > 0


def test_late_branches_leave_no_lease_of_boundaries(make_engine: MakeEngine, tmp_path: Path) -> None:
    leases = []
    for boundaries in (True, False):
        engine, held = make_engine(), Held()
        folder = save_mapper(tmp_path / f"mapper {boundaries}", engine.model)
        write_merging(folder, MergingConfig(boundaries=boundaries))
        engine.load_adapter(folder, "merger")
        state = team(held, reader=editor(adapter="merger")).compile(engine=engine).invoke(QUESTION, held.config())
        assert len(engine.inspect.joined(handle(state, "editor"))) == 1 + boundaries
        leases.append(engine.stats().leases)
    assert leases[0] == leases[1] > 0


@pytest.mark.parametrize("others", ["shared", "reencoded"])
@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_a_late_branch_brings_its_boundary(make_engine: MakeEngine, tmp_path: Path, strategy: Any, others: Any) -> None:
    engine, held = make_engine(), Held()
    folder = save_mapper(tmp_path / "mapper", engine.model)
    write_merging(folder, MergingConfig(boundaries=True))
    engine.load_adapter(folder, "merger")
    merges = {"a": others, "b": "shared", "c": others}
    graph = team(held, reader=editor(adapter="merger", strategy=strategy, merges=merges, prompt="Say it all."))
    with engine.scope():
        state = graph.compile(engine=engine).invoke(QUESTION, held.config())
        made = handle(state, "editor")
        known = {record.handle: record for record in engine.inspect.records([made])}
        placed = dict(zip(known[made].parents, known[made].offsets, strict=True))
        late, start = engine.inspect.joined(made)
        opening = tuple(engine.model.encode(engine.chat.start("assistant")))
        starts = [each for each in placed if tuple(known[each].tokens) == opening]
        copies = [each for each in placed if "~" in each.model and each not in starts]
        assert tuple(known[late].tokens) == tuple(engine.tokens(handle(state, "b")))
        assert len(copies) == len(starts) == (3 if others == "shared" else 1)
        assert start in starts and placed[start] == placed[late] + late.length
        assert sorted(placed[each] for each in starts) == sorted(placed[each] + each.length for each in copies)
        trunk = engine.prefill(engine.chat.root("Root."))
        question = engine.prefill(engine.chat.turn("user", QUESTION["messages"][0][1]), [trunk])
        for each in starts:
            [*before, own] = known[each].parents
            assert before == [trunk, question] and own in copies, "neither other branches nor what the editor is asked"
    assert engine.stats().leases == 0
    engine.check()


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_a_late_branch_is_seen_by_the_rule_of_its_source(engine: Engine, mode: Any) -> None:
    held = Held()
    reader = editor(merges={"a": "shared", "b": mode, "c": "shared"})
    state = team(held, reader=reader).compile(engine=engine).invoke(QUESTION, held.config())
    made, late = handle(state, "editor"), handle(state, "b")
    [joined] = engine.inspect.joined(made)
    assert joined.length == late.length and (joined == late) is (mode == "shared")
    [lineage] = engine.inspect.audit([made]).messages
    assert late in {each.handle for each in lineage.through("encoding" if mode == "shared" else "words")}


def test_what_is_private_stays_so_however_late(engine: Engine) -> None:
    """b has seen a plan that the editor must not: its words are encoded again, after it has begun to speak."""
    held = Held()
    graph = team(held, policy=Policy(on_violation="reencode"))
    graph.edges = {edge for edge in graph.edges if edge[0] != START}
    graph.add_node(Agent("planner", sampling=SHORT))
    graph.add_edge(START, "planner")
    for name in "ac":
        graph.add_edge("planner", name, visibility="private")
    graph.add_edge("planner", "b")
    graph.share("planner", "editor", "private")
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION, held.config())
    made, plan = handle(state, "editor"), handle(state, "planner")
    assert plan in engine.inspect.ancestors(handle(state, "b")) and plan not in engine.inspect.ancestors(made)
    [joined] = engine.inspect.joined(made)
    assert joined.length == handle(state, "b").length and joined != handle(state, "b")
    assert not app.audit(state).violations


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_text_methods_leave_late_branches_out(make_engine: MakeEngine, method: str) -> None:
    engine, held = make_engine(method=method), Held()
    state = team(held).compile(engine=engine).invoke(QUESTION, held.config())
    assert branches(state) == {"a": 0, "c": 0} and len(state["messages"]) == 5


def test_a_team_with_a_quorum_is_a_node_of_another_graph(engine: Engine) -> None:
    held = Held()
    outer = ChoreoGraph()
    outer.add_node("team", team(held).compile(engine=engine))
    outer.add_node(Agent("closer", sampling=SHORT))
    outer.add_edge(START, "team")
    outer.add_edge("team", "closer")
    state = outer.compile(engine=engine).invoke(QUESTION, held.config())
    made = handle(state, "team|editor")
    assert engine.inspect.joined(made).keys() == {handle(state, "team|b")}
    assert made in engine.inspect.ancestors(handle(state, "closer"))


def plain(_: Any) -> dict[str, Any]:
    return {}


def unequal(graph: ChoreoGraph) -> None:
    graph.add_node(Agent("p"))
    graph.add_edge(START, "p")
    graph.add_edge("p", "b")


BROKEN: dict[str, tuple[Callable[[ChoreoGraph], Any], str]] = {
    "unequal starts": (unequal, "'a' and 'b' are not started from the same nodes"),
    "one behind another": (lambda g: g.add_edge("a", "b"), "'b' runs after 'a', which it merges, too"),
    "another way in": (
        lambda g: (g.add_node(Agent("p")), g.add_edge(START, "p"), g.add_edge("p", "editor")),
        "also runs after 'p', which it does not merge",
    ),
    "no way in": (lambda g: g.edges.discard(("b", "editor")), "'b' has no edge to it"),
    "a function": (lambda g: (g.nodes.pop("b"), g.add_node("b", plain)), "merges 'b', which is no agent"),
    "a route to it": (
        lambda g: g.add_conditional_edges("a", lambda _: "editor", ["editor"]),
        "a route after 'a' leads to it",
    ),
    "a command": (
        lambda g: (g.add_node("p", plain, destinations=("b",)), g.add_edge(START, "p")),
        "a Command of 'p' may start 'b' alone",
    ),
    "a cache": (lambda g: setattr(g.nodes["b"], "cache_policy", CachePolicy()), "'b' has a cache policy"),
    "a cache of its own": (
        lambda g: setattr(g.nodes["editor"], "cache_policy", CachePolicy()),
        "it has a cache policy",
    ),
    "a cache for all": (lambda g: g.set_node_defaults(cache_policy=CachePolicy()), "has a cache policy"),
    "deferred": (lambda g: setattr(g.nodes["editor"], "defer", True), "leave defer out"),
    "nothing starts them": (
        lambda g: (g.add_node(Agent("p")), [g.edges.discard((START, n)) for n in "abc"], g.add_edge(START, "p")),
        "nothing starts 'a'",
    ),
}


@pytest.mark.parametrize("what", sorted(BROKEN))
def test_where_they_cannot_run_together_it_says_what_to_do(engine: Engine, what: str) -> None:
    graph = team(None)
    change, message = BROKEN[what]
    change(graph)
    with pytest.raises(VisibilityError, match=message) as error:
        graph.compile(engine=engine)
    assert "'editor' cannot start before all its branches are in" in str(error.value)


async def test_a_route_without_targets_cannot_start_it_alone(engine: Engine) -> None:
    graph = team(None, reader=editor(sampling=SHORT))
    graph.edges.discard(("editor", END))
    graph.add_conditional_edges("editor", lambda _: "editor")
    with pytest.raises(InvalidRequestError, match="something else than what starts its branches"):
        await asyncio.wait_for(graph.compile(engine=engine).ainvoke(QUESTION), 20)


@pytest.mark.parametrize("targets", ["editor", ["a", "b"], [Send("c", {})]])
@pytest.mark.parametrize("sync", [True, False])
def test_a_command_that_did_not_say_where_it_goes_cannot_start_them(engine: Engine, targets: Any, sync: bool) -> None:
    graph = team(None, reader=editor(sampling=SHORT))
    graph.edges.discard(("editor", END))
    graph.add_node("again", lambda _: Command(goto=targets))
    graph.add_edge("editor", "again")
    app = graph.compile(engine=engine)
    with pytest.raises(VisibilityError, match="a Command of 'again' may start"):
        run(app, QUESTION, {}, sync=sync)


def test_subgraphs_and_chains_of_quorums_are_refused(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("b", team(None).compile(engine=engine))
    graph.add_node(editor("b", quorum=1))
    graph.add_edge(START, "b")
    graph.add_edge("b", "editor")
    with pytest.raises(VisibilityError, match="merges 'b', which is no agent"):
        graph.compile(engine=engine)
    graph = team(None)
    graph.add_node(Synthesizer("chief", merges=["editor"], quorum=1))
    graph.add_edge("editor", "chief")
    with pytest.raises(VisibilityError, match="merges 'editor', which has a quorum itself"):
        graph.compile(engine=engine)


@pytest.mark.parametrize(
    "stops", [{"interrupt_before": ["editor"]}, {"interrupt_after": ["a"]}, {"interrupt_after": "*"}]
)
def test_a_run_cannot_stop_between_them(engine: Engine, stops: dict[str, Any]) -> None:
    with pytest.raises(VisibilityError, match="stop elsewhere"):
        team(None).compile(InMemorySaver(), engine=engine, **stops)
    team(None).compile(InMemorySaver(), engine=engine, interrupt_before=["a"], interrupt_after=["editor"])


@pytest.mark.parametrize(
    "options",
    [
        {"quorum": 0},
        {"quorum": True},
        {"quorum": 2, "strategy": "text"},
        {"quorum": 2, "strategy": "summary"},
        {"quorum": 2, "deadline_s": -1.0},
        {"quorum": None, "deadline_s": 1.0},
    ],
)
def test_a_quorum_that_cannot_be_kept_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        editor(**options)


def test_it_needs_a_graph_that_starts_it_and_room_to_run(engine: Engine) -> None:
    stock = StateGraph(ChoreoState)
    for name in "ab":
        stock.add_node(Agent(name, engine=engine, sampling=SHORT))
        stock.add_edge(START, name)
        stock.add_edge(name, "editor")
    stock.add_node(editor("a", "b", engine=engine))
    with pytest.raises(InvalidRequestError, match="only a ChoreoGraph can keep"):
        stock.compile().invoke(QUESTION)  # type: ignore[call-overload]
    outer = ChoreoGraph()
    outer.add_node("team", stock.compile())
    outer.add_edge(START, "team")
    with pytest.raises(InvalidRequestError, match="only a ChoreoGraph can keep"):
        outer.compile(engine=engine).invoke(QUESTION)
    app = team(None, reader=editor(sampling=SHORT)).compile(engine=engine)
    with pytest.raises(InvalidRequestError, match="max_concurrency=1"):
        app.invoke(QUESTION, {"max_concurrency": 1})
    assert branches(app.invoke(QUESTION, {"max_concurrency": 2}))
