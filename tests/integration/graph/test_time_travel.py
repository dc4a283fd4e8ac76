"""A thread that goes back to an earlier state, or forks from one, and what its calls are named by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import add
from threading import Lock
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import task
from langgraph.graph import StateGraph
from langgraph.types import Command, Send, interrupt
from support.graphs import QUESTION

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, RunOptions, Sampling, Worker

FREE = Sampling(temperature=1.0, max_tokens=8, stop_tokens=())
Called = tuple[str, int, int, int]


class Rounds(ChoreoState, total=False):
    rounds: Annotated[int, add]
    note: str
    told: Annotated[list[str], add]


class Asked:
    """The calls of runs that were really decoded, in a thread or in none."""

    def __init__(self, thread: str | None = "1", **configurable: Any) -> None:
        self.configurable = configurable | ({} if thread is None else {"thread_id": thread})
        self.calls: list[Called] = []

    def config(self, at: Any = None, **options: Any) -> Any:
        """Of a run; at a state of the thread's, if one is given."""
        self.calls = []
        at = {} if at is None else getattr(at, "config", at)["configurable"]
        return {"configurable": self.configurable | at | {"choreo": RunOptions(logits_callback=self._watch, **options)}}

    def _watch(self, *call: Any) -> Callable[[Any], None]:
        firsts = iter([call])
        return lambda _: self.calls.extend(islice(firsts, 1))

    @property
    def authors(self) -> list[str]:
        return sorted(author for author, *_ in self.calls)


def agent(name: str, **options: Any) -> Agent:
    return Agent(name, **({"sampling": FREE} | options))


def texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"]]


class Saver(InMemorySaver):
    """LangGraph's own lists a dict that a branch beside it may be putting into: replayed subgraphs do both at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def list(self, *given: Any, **options: Any) -> Iterator[CheckpointTuple]:
        with self._lock:
            return iter([*super().list(*given, **options)])

    def put(self, *given: Any) -> Any:
        with self._lock:
            return super().put(*given)


def ids(state: Any) -> list[str]:
    return [message.id for message in state["messages"]]


def decoded(state: Any) -> list[dict[str, Any]]:
    return [entry["handle"] for entry in state["handles"] if entry["author"] != START]


def twice(_: Any = None) -> list[str]:
    return ["a", "b"]


def team(engine: Engine, **options: Any) -> Any:
    """A graph of two who speak after each other."""
    graph = ChoreoGraph()
    graph.add_node(agent("lead", prompt="Go.")).add_node(agent("second"))
    return graph.add_edge(START, "lead").add_edge("lead", "second").compile(engine=engine, **options)


def everything(engine: Engine) -> ChoreoGraph:
    """Siblings, a worker that says two messages in each of two branches, two branches of a subgraph, and a loop."""
    graph = ChoreoGraph(Rounds, visibility="shared")
    graph.add_node(agent("left")).add_node(agent("right"))
    graph.add_edge(START, "left").add_edge(START, "right")
    graph.add_node(Worker("worker", n=2, sampling=FREE)).add_node("team", team(engine))
    graph.add_node("gather", lambda _: {"rounds": 1})
    graph.add_edge(["left", "right"], "gather")
    graph.add_node(agent("judge", reads={START: "private", "*": "private"}, prompt="Toss a coin."))

    def spread(state: Any) -> list[Send]:
        return [Send("worker", state), Send("worker", state), Send("team", state), Send("team", state)]

    graph.add_conditional_edges("gather", spread, ["worker", "team"])
    graph.add_edge("worker", "judge").add_edge("team", "judge")
    graph.add_conditional_edges("judge", lambda s: END if s["rounds"] > 1 else "gather", ["gather", END])
    return graph


def test_going_back_asks_nobody_again_where_nothing_has_changed(engine: Engine) -> None:
    asked = Asked()
    app = everything(engine).compile(Saver(), engine=engine)
    state = app.invoke(QUESTION, asked.config())
    # left, right; twice four messages of workers, two teams of two, and a judge
    assert len(asked.calls) == 2 + 2 * (4 + 4 + 1) and len(set(ids(state))) == len(ids(state)) == 1 + len(asked.calls)
    handles = decoded(state)
    assert len({handle["id"] for handle in handles}) == len(handles), "no two of them share an answer"
    history = [each for each in app.get_state_history(asked.config()) if each.next]
    assert len(history) == 8
    for before in history:
        again = app.invoke(None, asked.config(before))
        assert (asked.calls, ids(again), texts(again), decoded(again)) == ([], ids(state), texts(state), handles)


def test_a_run_draws_what_another_run_of_the_same_graph_drew(make_engine: MakeEngine) -> None:
    """With the same seed and input: in another thread, in no thread, and on another engine; also in subgraphs."""
    states = []
    for saver, asked in ((Saver(), Asked("1")), (Saver(), Asked("2")), (None, Asked(None))):
        app = (engine := make_engine()) and everything(engine).compile(saver, engine=engine)
        states.append(app.invoke(QUESTION, asked.config(seed=3)))
        assert len(asked.calls) == 20
    assert texts(states[0]) == texts(states[1]) == texts(states[2])
    by_team = [tuple(m.text for m in states[0]["messages"] if m.name == name) for name in ("lead", "second", "worker")]
    assert [len(set(said)) for said in by_team] == [4, 4, 8], "branches do not all draw the same"


@pytest.mark.parametrize("saver", [None, Saver()])
def test_runs_that_no_thread_keeps_are_asked_each(engine: Engine, saver: Any) -> None:
    """Without a thread, or without what keeps it: a thread's id alone does not make one run of two."""
    app = everything(engine).compile(engine=engine)
    for thread in ("1", None):
        for _ in range(2):
            app.invoke(QUESTION, (asked := Asked(thread)).config())
            assert len(asked.calls) == 20
    kept = everything(engine).compile(Saver(), engine=engine)
    first, second = (kept.invoke(QUESTION, (asked := Asked(thread)).config()) for thread in ("1", "2"))
    assert len(asked.calls) == 20 and not set(ids(first)[1:]) & set(ids(second)[1:])


def forked(engine: Engine) -> tuple[Any, Asked, Any]:
    """A chain of one who reads the question, one who reads the first, and one who reads nobody."""
    graph = ChoreoGraph(Rounds)
    graph.add_node(agent("ann")).add_node(agent("bob"))
    graph.add_node(agent("cid", reads={START: "private"}, prompt="Toss a coin."))
    graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "cid", visibility={})
    app, asked = graph.compile(Saver(), engine=engine), Asked()
    return app, asked, app.invoke(QUESTION, asked.config())


def at(app: Any, asked: Asked, following: str) -> Any:
    """The first state of a thread before a node."""
    return [each for each in app.get_state_history(asked.config()) if each.next == (following,)][-1]


def test_a_fork_asks_those_again_whose_view_has_changed(engine: Engine) -> None:
    app, asked, state = forked(engine)
    fork = app.update_state(at(app, asked, "bob").config, {"note": "nothing that anybody reads"})
    again = app.invoke(None, asked.config(fork))
    assert (asked.calls, ids(again), texts(again)) == ([], ids(state), texts(state)), "though LangGraph counts the edit"

    said = at(app, asked, "bob").values["messages"][-1]
    fork = app.update_state(at(app, asked, "bob").config, {"messages": [said.model_copy(update={"content": "No."})]})
    edited = app.invoke(None, asked.config(fork))
    assert asked.authors == ["bob"], "cid sees neither"
    assert ids(edited) == ids(state) and texts(edited)[1] == "No."
    assert texts(edited)[2] != texts(state)[2] and texts(edited)[3] == texts(state)[3]
    # Either branch of the thread goes on with its own.
    for last, config in ((state, at(app, asked, "bob").config), (edited, fork)):
        assert texts(app.invoke(None, asked.config(config))) == texts(last) and not asked.calls


def test_a_run_may_ask_again(engine: Engine) -> None:
    app, asked, state = forked(engine)
    before = at(app, asked, "bob")
    same = app.invoke(None, asked.config(before, regenerate=True))
    assert asked.authors == ["bob", "cid"]
    assert texts(same) == texts(state), "the seed is the same"

    other = app.invoke(None, asked.config(before, regenerate=True, seed=9))
    assert asked.authors == ["bob", "cid"]
    assert ids(other) == ids(state), "in the place of what was said there, beside nothing else"
    assert texts(other)[:2] == texts(state)[:2] and not set(texts(other)[2:]) & set(texts(state)[2:])
    assert [entry["message_id"] for entry in other["handles"]] == ids(state)
    remembered = app.invoke(None, asked.config(before, seed=9))
    assert (asked.calls, decoded(remembered)) == ([], decoded(other))
    assert texts(app.invoke(None, asked.config(before))) == texts(state) and not asked.calls
    assert texts(app.get_state(asked.config(before)).values) == texts(state)[:2], "the past stays what it was"


def test_a_new_answer_takes_the_place_of_the_known_one(engine: Engine) -> None:
    warm = Sampling(temperature=1.0, max_tokens=8, stop_tokens=())  # each repetition of a call has a seed of its own
    first = engine.decode([7], sampling=warm, idempotency_key="m")
    second = engine.decode([7], sampling=warm, idempotency_key="m", regenerate=True)
    assert first != second == engine.decode([7], sampling=warm, idempotency_key="m")
    engine.release(first)
    engine.check()
    steps = engine.stats().steps
    assert engine.decode([7], sampling=warm, idempotency_key="m") == second and engine.stats().steps == steps
    for _ in range(3):
        engine.release(second)
    assert engine.decode([7], sampling=warm, idempotency_key="m", regenerate=True) not in (first, second)


def test_who_sees_the_same_in_the_next_turn_or_round_is_asked_again(engine: Engine) -> None:
    graph = ChoreoGraph(Rounds)
    graph.add_node(agent("coin", reads={START: "private"}, history=0, prompt="Toss a coin."))
    graph.add_node("count", lambda _: {"rounds": 1})
    graph.add_edge(START, "coin").add_edge("coin", "count")
    graph.add_conditional_edges("count", lambda s: "coin" if s["rounds"] % 3 else END, ["coin", END])
    app, asked = graph.compile(Saver(), engine=engine), Asked()
    for turn in (1, 2):
        state = app.invoke(QUESTION, asked.config())
        assert asked.authors == ["coin"] * 3
        tosses = [message.text for message in state["messages"] if message.name == "coin"]
        assert len(tosses) == len(set(tosses)) == 3 * turn
    entries = [entry for entry in state["handles"] if entry["author"] == "coin"]
    views = [engine.inspect.records([engine_handle(entry)])[-1].parents for entry in entries]
    assert len(set(views)) == 1, "they all saw the same"


@pytest.mark.parametrize("sends", [False, True])
def test_who_speaks_where_a_message_was_removed_is_asked_again(engine: Engine, sends: bool) -> None:
    """Also if it sees the same as who said that: what was removed was said in a place of its own."""
    worker = Worker("worker", sampling=FREE)
    graph = ChoreoGraph(Rounds)
    graph.add_node(worker if sends else agent("worker", prompt="Go."))

    def remove(state: Any) -> dict[str, Any]:
        last = state["messages"][-1]
        return {"rounds": 1, "told": [last.text], "messages": [RemoveMessage(id=last.id)]}

    def following(state: Any) -> Any:
        if state.get("rounds", 0) == 3:
            return END
        return worker.send(state, "Go.", shared=[]) if sends else "worker"

    graph.add_node("remove", remove).add_edge("worker", "remove")
    graph.add_conditional_edges(START, following, ["worker"])
    graph.add_conditional_edges("remove", following, ["worker", END])
    app, asked = graph.compile(Saver(), engine=engine), Asked()
    state = app.invoke(QUESTION, asked.config())
    assert asked.authors == ["worker"] * 3 and len(set(state["told"])) == 3
    for before in [each for each in app.get_state_history(asked.config()) if each.next]:
        assert app.invoke(None, asked.config(before))["told"] == state["told"] and not asked.calls


def engine_handle(entry: Any) -> Any:
    from choreo_agents import MessageHandle

    return MessageHandle.model_validate(entry["handle"])


def asking(call: Any, given: Callable[[Any], Any], *keeps: str, stops: bool = False) -> Any:
    """Three rounds of a function that asks twice."""

    async def node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        said = [await call(given(state), config) for _ in range(2)]
        if stops and state.get("rounds", 0) == 1:
            interrupt("go on?")
        told = [update["messages"][-1].text for update in said]
        return {"told": told, "rounds": 1} | {
            name: [each for update in said for each in update[name]] for name in keeps
        }

    graph = StateGraph(Rounds)
    graph.add_node("asks", node)
    graph.add_edge(START, "asks")
    graph.add_conditional_edges("asks", lambda s: END if s["rounds"] > 2 else "asks", ["asks", END])
    return graph.compile(Saver())


async def test_a_function_that_asks_over_its_graphs_state_finds_its_answers(engine: Engine) -> None:
    app, asked = asking(agent("coin", engine=engine).ainvoke, dict, "handles", "messages"), Asked()
    state = await app.ainvoke(QUESTION, asked.config())
    assert len(asked.calls) == len(set(state["told"])) == 6
    for before in [each async for each in app.aget_state_history(asked.config()) if each.next]:
        again = await app.ainvoke(None, asked.config(before))
        assert (asked.calls, again["told"]) == ([], state["told"])
        assert texts(again) == texts(state) and len(set(ids(again))) == len(ids(state)), "none replaces another"


@pytest.mark.parametrize("by_graph", [False, True])
async def test_a_function_that_asks_over_a_state_of_its_own_is_answered_in_each_round(
    engine: Engine, by_graph: bool
) -> None:
    """Nothing is added then to the entries by which our supersteps are counted."""
    call = team(engine).ainvoke if by_graph else agent("coin", engine=engine).ainvoke
    app, asked = asking(call, lambda _: {"messages": [("user", "Toss.")]}, "messages", stops=True), Asked()
    await app.ainvoke(QUESTION, asked.config())
    assert len(asked.calls) == (8 if by_graph else 4), "two rounds, and the second stops"
    state = await app.ainvoke(Command(resume=True), asked.config())
    assert len(asked.calls) == (4 if by_graph else 2), "the second is there, the third is new"
    said = [message for message in state["messages"] if message.type == "ai"]
    assert len({message.id for message in said}) == len(said) == (12 if by_graph else 6), "none replaces another"


async def test_two_tasks_of_one_function_and_two_ways_to_one_node_are_two_places(engine: Engine) -> None:
    speaker = agent("speaker", engine=engine)

    @task
    async def speak(state: Any, config: RunnableConfig) -> Any:
        return await speaker.ainvoke(state, config)

    async def node(state: Any) -> dict[str, Any]:
        said = [await call for call in [speak(dict(state)), speak(dict(state))]]
        return {"messages": [update["messages"][-1] for update in said]}

    graph = StateGraph(ChoreoState)
    graph.add_node("asks", node)
    graph.add_edge(START, "asks")
    app, asked = graph.compile(Saver()), Asked()
    state = await app.ainvoke(QUESTION, asked.config())
    assert len(asked.calls) == 2 and len(state["messages"]) == 3

    both = ChoreoGraph()
    both.add_node(agent("ann")).add_node("fork", lambda _: {}).add_node("back", lambda _: {})
    both.add_edge(START, "fork").add_edge("fork", "ann")
    both.add_conditional_edges("fork", lambda s: [Send("ann", s)], ["ann"])
    app, asked = both.compile(Saver(), engine=engine), Asked("2")
    state = await app.ainvoke(QUESTION, asked.config())
    assert len(asked.calls) == 2 and len(state["messages"]) == 3


@pytest.mark.parametrize("positions", ["sequential", "parallel"])
def test_branches_of_a_subgraph_stand_as_they_were_sent(engine: Engine, positions: Any) -> None:
    """In whatever order their message ids sort; where positions are parallel, side by side."""
    graph = ChoreoGraph(positions=positions)
    graph.add_node("team", team(engine)).add_node(agent("judge"))
    graph.add_conditional_edges(START, lambda s: [Send("team", s)] * 3, ["team"])
    graph.add_edge("team", "judge")
    app, orders = graph.compile(Saver(), engine=engine), set()
    for thread in range(4):
        state = app.invoke(QUESTION, Asked(str(thread)).config())
        leads = [entry for entry in state["handles"] if entry["author"] == "team|lead"]
        assert [entry.get("task_path", [0]) for entry in leads] == [[0], [1], [2]]
        [judge] = [entry for entry in state["handles"] if entry["author"] == "judge"]
        made = engine.inspect.records([engine_handle(judge)])[-1]
        places = [made.parents.index(engine_handle(entry)) for entry in leads]
        offsets = {made.offsets[place] for place in places}
        assert places == sorted(places) and len(offsets) == (1 if positions == "parallel" else 3)
        ids_of = [entry["message_id"] for entry in leads]
        orders.add(tuple(sorted(range(3), key=ids_of.__getitem__)))
    assert len(orders) > 1


async def test_a_subgraph_that_is_stopped_finds_what_was_said_in_it(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("lead")).add_node("stop", lambda _: interrupt("go on?") and {}).add_node(agent("second"))
    inner = graph.add_edge(START, "lead").add_edge("lead", "stop").add_edge("stop", "second").compile(engine=engine)
    outer = ChoreoGraph()
    outer.add_node("team", inner)
    outer.add_conditional_edges(START, lambda s: [Send("team", s), Send("team", s)], ["team"])
    app, asked = outer.compile(Saver(), engine=engine), Asked()
    await app.ainvoke(QUESTION, asked.config())
    assert asked.authors == ["team|lead"] * 2
    stopped = await app.aget_state(asked.config())
    resume = {each.id: True for each in stopped.interrupts}
    state = await app.ainvoke(Command(resume=resume), asked.config())
    assert asked.authors == ["team|second"] * 2 and len(set(texts(state))) == 5
    first = [each async for each in app.aget_state_history(asked.config())][-1]
    await app.ainvoke(None, asked.config(first))
    again = await app.ainvoke(
        Command(resume={e.id: True for e in (await app.aget_state(asked.config())).interrupts}), asked.config()
    )
    assert (asked.calls, texts(again)) == ([], texts(state))
