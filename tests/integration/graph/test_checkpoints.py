"""What checkpoints hold of `handles`: what is new in each, and all of them now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from operator import add
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import HumanMessage
from langgraph.channels import BinaryOperatorAggregate, DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.message import add_messages
from langgraph.types import Command, Overwrite, Send, interrupt
from pydantic import BaseModel, TypeAdapter

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, Sampling
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.state import HandleEntry, Handles, merge_entries

SHORT = Sampling(temperature=1.0, max_tokens=2, stop_tokens=())


class Growing(ChoreoState, total=False):
    rounds: Annotated[int, add]
    most: int


class WholeState(ChoreoState, total=False):
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
    with pytest.raises(InvalidRequestError, match="have another reducer"):
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
def test_what_checkpoints_hold_of_handles_grows_by_what_is_new(
    make_engine: MakeEngine, record_property: Any, most: int
) -> None:
    """docs/how-to/go-back-in-a-thread.md has the numbers of 200 supersteps."""
    found = {}
    for schema in (Growing, Whole):
        graph = ChoreoGraph(schema).add_node(agent("ann")).add_node("count", lambda _: {"rounds": 1})
        graph.add_edge(START, "ann").add_edge("ann", "count")
        graph.add_conditional_edges("count", lambda s: "ann" if s["rounds"] < s["most"] else END, ["ann", END])
        app = graph.compile(saver := InMemorySaver(), engine=make_engine(salt="s"))
        config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": 1000}
        app.invoke({"messages": [HumanMessage("What?", id="1")], "most": most}, config)
        found[schema] = stored(saver)
    one = found[Growing]["handles written"] / (most + 1)
    assert found[Growing]["handles written"] == found[Whole]["handles written"]
    # All of them at each update, or at every fifth.
    assert found[Whole]["handles"] / one == pytest.approx(sum(range(1, most + 1)), rel=0.1)
    assert found[Growing]["handles"] / one == pytest.approx(sum(range(5, most + 1, 5)), rel=0.1)
    record_property("counts", {schema.__name__: sizes for schema, sizes in found.items()})
