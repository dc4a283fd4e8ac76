"""What checkpoints hold of `handles` and `messages`: what is new in each, and all of them now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from operator import add
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels import BinaryOperatorAggregate, DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command, Overwrite, Send, interrupt
from pydantic import BaseModel, TypeAdapter

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, Sampling
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.state import HandleEntry, Handles, merge_entries

SHORT = Sampling(temperature=1.0, max_tokens=2, stop_tokens=())


class Growing(ChoreoState, total=False):
    rounds: Annotated[int, add]
    most: int


class WholeMessages(ChoreoState, total=False):
    messages: Annotated[list[AnyMessage], add_messages]  # type: ignore[misc]


class WholeState(WholeMessages, total=False):
    handles: Annotated[list[HandleEntry], merge_entries]  # type: ignore[misc]


class Whole(WholeState, total=False):
    rounds: Annotated[int, add]
    most: int


class Model(BaseModel):
    handles: Annotated[list[HandleEntry], merge_entries] = []
    messages: Annotated[list[Any], add_messages] = []


@dataclasses.dataclass
class Data:
    handles: Handles = dataclasses.field(default_factory=list)
    messages: Annotated[list[Any], add_messages] = dataclasses.field(default_factory=list)


class Lost(ChoreoState, total=False):
    handles: list[HandleEntry]  # type: ignore[misc]


def agent(name: str) -> Agent:
    return Agent(name, sampling=SHORT, history=1, reads={START: "private", "*": "private"}, prompt="Go.")


def program(engine: Engine, schema: Any, saver: Any) -> Any:
    """Rounds of siblings, branches of a subgraph, and a stop in every tenth."""
    inner = ChoreoGraph(ChoreoState if schema is Growing else WholeState)
    inner.add_node(agent("lead")).add_node(agent("second")).add_edge(START, "lead").add_edge("lead", "second")
    graph = ChoreoGraph(schema)
    graph.add_node(agent("left")).add_node(agent("right")).add_node("team", inner.compile(engine=engine))

    def count(state: Any) -> dict[str, Any]:
        if state.get("rounds", 0) % 10 == 9:
            interrupt("go on?")
        return {"rounds": 1}

    def route(state: Any) -> Any:
        if state["rounds"] % state["most"] == 0:
            return END
        return [Send("team", state)] * 2 if state["rounds"] % 4 == 3 else ["left", "right"]

    graph.add_node("count", count)
    graph.add_edge(START, "count")
    graph.add_conditional_edges("count", route, ["left", "right", "team", END])
    graph.add_edge("left", "count").add_edge("right", "count").add_edge("team", "count")
    return graph.compile(saver, engine=engine)


def shown(values: Any) -> list[Any]:
    """Entries, but for the signatures: the key is drawn."""
    return [{name: each[name] for name in each if name != "signature"} for each in values.get("handles") or []]


async def run(app: Any) -> list[Any]:
    """Two turns, edits, forks and overwritten handles; returns all states that the thread has been in, by and by."""
    config, found = {"configurable": {"thread_id": "1"}}, []

    async def goes_on(given: Any, at: Any = config) -> Any:
        state = await app.ainvoke(given, at)
        while (stopped := await app.aget_state(config)).interrupts:
            state = await app.ainvoke(Command(resume={each.id: True for each in stopped.interrupts}), config)
        found.append(shown(state))

    def asked(name: str) -> Any:
        return {"messages": [HumanMessage("What?", id=name)], "most": 8}

    await goes_on(asked("one"))
    await goes_on(asked("two"))
    history = [each async for each in app.aget_state_history(config)]
    for before in (history[12], history[-7]):
        await goes_on(None, before.config)
        fork = await app.aupdate_state(
            before.config, {"messages": [HumanMessage("Well?", id="three")]}, as_node="count"
        )
        await goes_on(None, fork)
    said = (await app.aget_state(config)).values["handles"]
    await goes_on(None, await app.aupdate_state(config, {"handles": Overwrite(said[:3]), "rounds": 1}, as_node="left"))
    await goes_on({**asked("four"), "handles": said[:5]})
    return [*found, *[shown(each.values) async for each in app.aget_state_history(config)]]


@asynccontextmanager
async def saving(kind: str, path: Path) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        if kind == "memory":
            yield InMemorySaver()
        else:
            yield await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(str(path)))


@pytest.mark.parametrize("kind", ["memory", pytest.param("sqlite", marks=pytest.mark.slow)])
async def test_growing_handles_are_what_whole_ones_are(make_engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    """In every state that a thread has ever been in."""
    found = []
    for schema in (Growing, Whole):
        async with saving(kind, tmp_path / schema.__name__) as saver:
            found.append(await run(program(make_engine(salt="s"), schema, saver)))
    assert len(found[0]) > 80 and max(map(len, found[0])) > 30
    assert found[0] == found[1]


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_another_process_reads_them_from_a_file(engine: Engine, tmp_path: Path, durability: Any) -> None:
    config: Any = {"configurable": {"thread_id": "1"}}
    question = {"messages": [("user", "What?")], "most": 4}
    with SqliteSaver.from_conn_string(str(tmp_path / "threads")) as saver:
        app = program(engine, Growing, saver)
        state = app.invoke(question, config, durability=durability)
        app.invoke(question, config, durability=durability)
        whole = [shown(each.values) for each in app.get_state_history(config)]
    with SqliteSaver.from_conn_string(str(tmp_path / "threads")) as saver:
        app = program(engine, Growing, saver)
        assert [shown(each.values) for each in app.get_state_history(config)] == whole
        assert shown(state) in whole and len(whole[0]) == 2 * len(shown(state))


def test_a_state_says_itself_how_its_handles_are_kept(engine: Engine) -> None:
    for schema, kind in (
        (ChoreoState, DeltaChannel),
        (Growing, DeltaChannel),
        (Whole, BinaryOperatorAggregate),
        (Model, BinaryOperatorAggregate),
        (Data, DeltaChannel),
    ):
        graph = ChoreoGraph(schema).add_node(agent("ann")).add_edge(START, "ann")
        assert isinstance(graph.channels["handles"], kind)
        app = graph.compile(InMemorySaver(), engine=engine)
        state = app.invoke({"messages": [HumanMessage("What?", id="1")]}, {"configurable": {"thread_id": "1"}})
        assert [entry["author"] for entry in state["handles"]] == [START, "ann"]
        if schema is not Data:
            assert app.get_input_jsonschema()["properties"]["handles"]["items"] == {"$ref": "#/$defs/HandleEntry"}
    assert TypeAdapter(ChoreoState).json_schema() is not None
    with pytest.raises(InvalidRequestError, match="would not be merged"):
        ChoreoGraph(Lost).add_node(agent("ann")).add_edge(START, "ann").compile(engine=engine)


def stored(saver: InMemorySaver) -> dict[str, int]:
    """Bytes that a saver holds of each channel, in checkpoints and in what their tasks wrote."""
    sizes = dict.fromkeys(("handles", "messages", "handles written", "messages written"), 0)
    for (_, _, channel, _), (_, data) in saver.blobs.items():
        if channel in sizes:
            sizes[channel] += len(data)
    for _, channel, (_, data), _ in (each for writes in saver.writes.values() for each in writes.values()):
        if channel in ("handles", "messages"):
            sizes[f"{channel} written"] += len(data)
    return sizes


@pytest.mark.parametrize("most", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_what_checkpoints_hold_grows_by_what_is_new(make_engine: MakeEngine, record_property: Any, most: int) -> None:
    """docs/how-to/serve-many-callers.md has the numbers of 200 supersteps."""
    found = {}
    for schema in (Growing, Whole):
        graph = ChoreoGraph(schema).add_node(agent("ann")).add_node("count", lambda _: {"rounds": 1})
        graph.add_edge(START, "ann").add_edge("ann", "count")
        graph.add_conditional_edges("count", lambda s: "ann" if s["rounds"] < s["most"] else END, ["ann", END])
        app = graph.compile(saver := InMemorySaver(), engine=make_engine(salt="s"))
        config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": 1000}
        app.invoke({"messages": [HumanMessage("What?", id="1")], "most": most}, config)
        found[schema] = stored(saver)
    whole_after = [0]
    for length in range(1, most + 1):
        if length - whole_after[-1] >= max(20, length // 8):
            whole_after.append(length)
    for channel in ("handles", "messages"):
        assert found[Growing][f"{channel} written"] == found[Whole][f"{channel} written"]
        one = found[Growing][f"{channel} written"] / (most + 1)
        # All of them at each update; at every twentieth, or after an eighth of their number.
        assert found[Whole][channel] / one == pytest.approx(sum(range(1, most + 1)), rel=0.1)
        assert found[Growing][channel] / one == pytest.approx(sum(whole_after), rel=0.15)
    record_property("counts", {schema.__name__: sizes for schema, sizes in found.items()})


def test_what_a_turn_writes_does_not_depend_on_how_many_there_were(engine: Engine, tmp_path: Path) -> None:
    """Rows and bytes of forty turns, in which checkpoints had all of it at least once."""
    app_of = ChoreoGraph().add_node(agent("ann")).add_edge(START, "ann").add_edge("ann", END)
    config: Any = {"configurable": {"thread_id": "1"}}
    with SqliteSaver.from_conn_string(str(tmp_path / "threads")) as saver:
        app, held = app_of.compile(saver, engine=engine), [(0, 0)]
        for _ in range(120):
            app.invoke({"messages": [("user", "What?")]}, config)
            bytes_of = "select count(*), sum(length({})) from {}"
            tables = (("checkpoint", "checkpoints"), ("value", "writes"))
            found = [saver.conn.execute(bytes_of.format(*each)).fetchone() for each in tables]
            held.append((sum(rows for rows, _ in found), sum(size for _, size in found)))
    early, late = (tuple(b - a for a, b in zip(held[n], held[n + 40], strict=True)) for n in (20, 80))
    assert late[0] == early[0], "rows"
    assert late[1] < 1.6 * early[1], "bytes"


SAID: dict[str, Any] = {
    "words": "Well?",
    "pairs": [("ai", "one"), ("ai", "one")],
    "dict": {"role": "ai", "content": "two"},
    "unknown": [RemoveMessage(id="of nobody")],
    "all removed": [RemoveMessage(id=REMOVE_ALL_MESSAGES), "three"],
    "overwritten": Overwrite([HumanMessage("four")]),
    "nothing": None,
}
"""What nodes and callers may write to `messages`."""


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_growing_messages_are_what_those_of_add_messages_are(durability: Any) -> None:
    """Whatever is written, errors included, after which the thread goes on; with the same ids at each reading."""

    def states(schema: Any) -> list[Any]:
        written: list[Any] = []
        graph = StateGraph(schema).add_node("says", lambda state: {"messages": written[-1]})
        app = graph.add_edge(START, "says").compile(InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}

        def read() -> Any:
            return [(message.id, message.text) for message in app.get_state(config).values["messages"]]

        def outcome(call: Any) -> Any:
            try:
                return call()
            except (ValueError, TypeError) as error:
                return str(error)

        found: list[Any] = []
        for given, said in product(SAID.values(), SAID.values()):
            written.append(said)
            update = {"messages": given}
            found.append(isinstance(outcome(partial(app.invoke, update, config, durability=durability)), str))
            found.append(isinstance(outcome(partial(app.update_state, config, update, as_node="says")), str))
            state = outcome(read)
            assert state == outcome(read), "the ids"
            found.append(state if isinstance(state, str) else [text for _, text in state])
        return found

    growing, whole = states(ChoreoState), states(MessagesState)
    assert growing == whole
    assert growing.count(True) > 10, "errors"


def test_a_thread_may_change_from_one_to_the_other() -> None:
    saver, config = InMemorySaver(), RunnableConfig(configurable={"thread_id": "1"})
    lengths = []
    for schema in (WholeState, ChoreoState, WholeState):
        graph: Any = StateGraph(schema)  # type: ignore[arg-type]
        graph.add_node("says", lambda _: {"messages": [("ai", "Hm.")]})
        app = graph.add_edge(START, "says").compile(saver)
        for _ in range(25):
            app.invoke({"messages": [("user", "Well?")]}, config)
        lengths.append([len(each.values.get("messages", [])) for each in app.get_state_history(config)])
    assert [max(each) for each in lengths] == [50, 100, 150]
    assert lengths[1][-len(lengths[0]) :] == lengths[0] and lengths[2][-len(lengths[1]) :] == lengths[1]


@pytest.mark.parametrize("schema", [ChoreoState, WholeMessages])
def test_nodes_may_read_messages_by_another_schema(schema: Any) -> None:
    def one(state: ChoreoState) -> Any:
        return {"messages": [AIMessage("one")]}

    def two(state: MessagesState) -> Any:
        return {"messages": [AIMessage(f"{len(state['messages'])}")]}

    graph = ChoreoGraph(schema, input_schema=MessagesState).add_node(one).add_node(two)
    app = graph.add_edge(START, "one").add_edge("one", "two").compile()
    assert [message.text for message in app.invoke({"messages": "Well?"})["messages"]] == ["Well?", "one", "2"]
    kind = DeltaChannel if schema is ChoreoState else BinaryOperatorAggregate
    assert isinstance(graph.channels["messages"], kind)
