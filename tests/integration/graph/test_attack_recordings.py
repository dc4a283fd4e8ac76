"""What recordings got wrong once: runs that they changed, words that they told, and differences that they missed."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from pydantic import BaseModel, ConfigDict
from support.recorded import FREE, QUESTION, Counted

from choreo_agents import START, Agent, ChoreoGraph, ChoreoState, fork, replay
from choreo_agents.engine.recording import read_recording
from choreo_agents.errors import ReplayError
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.replaying.changes import call_named

THREAD: Any = {"configurable": {"thread_id": "t"}}


def echoing(engine: Any) -> Any:
    """A subgraph's function says the same in every run, before Bob speaks."""
    inner = ChoreoGraph().add_node("echo", lambda _: {"messages": [AIMessage("ok")]})
    graph = ChoreoGraph().add_node("sub", inner.add_edge(START, "echo").compile(engine=engine))
    graph.add_node(Agent("bob", sampling=FREE)).add_edge(START, "sub").add_edge("sub", "bob")
    return graph.compile(InMemorySaver(), engine=engine)


def test_a_thread_in_two_recordings_loses_no_message(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Each of them has a first run: the ids that they give are not the same for that."""
    engine = make_engine()
    app = echoing(engine)
    for name in ("one", "two"):
        with engine.record(tmp_path / name):
            state = app.invoke(QUESTION, THREAD)
    assert [message.text for message in state["messages"]].count("ok") == 2 and len(state["messages"]) == 6


def test_runs_behind_one_that_was_left_are_played_and_forked(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    graph = ChoreoGraph(visibility="shared").add_node(Agent("ann", sampling=FREE)).add_node(Agent("bob", sampling=FREE))
    app = graph.add_edge(START, "ann").add_edge("ann", "bob").compile(engine=engine)
    with engine.record(path):
        for _ in app.stream(QUESTION):
            break
        app.invoke({"messages": [("user", "And Bob?")]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    said = next(line for line in lines if line["kind"] == "call" and line["run"] == 1)
    report = replay(app, path)
    assert report.same and [call.run for call in report.calls] == [0, 1, 1]
    assert [call.run for call in fork(app, path, set={"bob.system": "Ann has 3."}).changed] == [1]
    said["tokens"][0] += 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not replay(app, path).same


def summarising(rounds: int) -> ChoreoGraph:
    """Zoe and Ann speak, and a function puts one message in the place of all; so often, and then Bob speaks."""

    def summarise(state: Any) -> dict[str, Any]:
        told = HumanMessage(f"It was said: {state['messages'][-1].text}")
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), told], "looks": state.get("looks", 0) + 1}

    def route(state: Any) -> str:
        return "ann" if state["looks"] < rounds else "bob"

    graph = ChoreoGraph(Counted, visibility="shared").add_node("summarise", summarise)
    for name in ("zoe", "ann", "bob"):
        graph.add_node(Agent(name, sampling=FREE))
    graph.add_edge(START, "zoe").add_edge("zoe", "ann").add_edge("ann", "summarise")
    return graph.add_conditional_edges("summarise", route, ["ann", "bob"])


def test_what_was_said_after_messages_were_removed_is_not_before(make_engine: MakeEngine, tmp_path: Path) -> None:
    """He reads what was made of her words."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = summarising(1).compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    assert [(call.author, call.superstep) for call in read_recording(path).calls()][1:] == [("ann", 2), ("bob", 4)]
    changes = {"ann:1.words": "Nine red boats.", "zoe.system": "Zoe has 3."}
    report = fork(app, path, at="ann:1", set=changes, run="tools")
    found = {call.place[0]: call.outcome for call in report.calls}
    assert found == {"zoe": "taken", "ann": "set", "bob": "changed"}


def test_calls_are_numbered_as_they_were_made(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = summarising(3).compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    recording = read_recording(path)
    said = [call for call in recording.calls() if call.author == "ann"]
    assert [call.superstep for call in said] == [2, 4, 6]
    assert [call_named(recording, "ann", number) for number in (1, 2, 3)] == said


class Kept(ChoreoState, total=False):
    """With a channel for whatever functions find."""

    found: Any


class Found(TypedDict):
    """What the second function reads: no messages."""

    found: Any


def finding(first: Any, second: Any, *, confidential: bool = False) -> ChoreoGraph:
    """Ann speaks, one function finds something, another tells it, and Bob speaks."""
    graph = ChoreoGraph(Kept, visibility="shared")
    graph.add_node(Agent("ann", system="Ann has 3.", confidential=confidential, sampling=FREE))
    graph.add_node("first", first).add_node("second", second, input_schema=Found).add_node(Agent("bob", sampling=FREE))
    return graph.add_edge(START, "ann").add_edge("ann", "first").add_edge("first", "second").add_edge("second", "bob")


def said_by_ann(state: Any) -> str:
    return str(state["messages"][-1].text)


def nothing(_: Any) -> dict[str, Any]:
    return {}


def removing(state: Any) -> dict[str, Any]:
    return {"found": said_by_ann(state), "messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(lambda state: {"found": {said_by_ann(state): 3}}, nothing, id="key"),
        pytest.param(lambda state: {"found": deque([said_by_ann(state)])}, nothing, id="type"),
        pytest.param(removing, lambda state: {"found": state["found"] + "!"}, id="removed"),
        pytest.param(
            lambda state: {
                "messages": [state["messages"][0].model_copy(update={"additional_kwargs": {"k": said_by_ann(state)}})]
            },
            nothing,
            id="note",
        ),
    ],
)
def test_confidential_words_are_masked_wherever_a_function_puts_them(
    make_engine: MakeEngine, tmp_path: Path, first: Any, second: Any
) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = finding(first, second, confidential=True).compile(engine=engine)
    with engine.record(path):
        state = app.invoke(QUESTION)
    last = read_recording(path).nodes()[0 if second is nothing else 1]
    assert last.masked and last.result is None, Packing(None).unpacked(last.result or "null:")
    assert state["messages"]


def array(state: Any) -> Any:
    found = np.zeros(2000)
    found[1000] = len(state["messages"][-1].text)
    return found


class Loose(BaseModel):
    """Takes fields that it was not declared with."""

    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("first", "tell"),
    [
        pytest.param(lambda state: {"found": array(state)}, lambda found: int(found.sum()), id="array"),
        pytest.param(
            lambda state: {"found": Loose(length=len(state["messages"][-1].text))},
            lambda found: found.length,
            id="extra",
        ),
        pytest.param(
            lambda state: {"found": AIMessage("", additional_kwargs={"n": len(state["messages"][-1].text)})},
            lambda found: found.additional_kwargs["n"],
            id="note",
        ),
    ],
)
def test_a_function_whose_input_has_changed_is_not_given_its_old_result(
    make_engine: MakeEngine, tmp_path: Path, first: Any, tell: Any
) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = finding(first, lambda state: {"messages": [AIMessage(f"{tell(state['found'])} letters")]}).compile(
        engine=engine
    )
    with engine.record(path):
        app.invoke(QUESTION)
    changes = {"ann:1.words": "Ann has nine red boats, of which none is hers."}
    with pytest.raises(ReplayError, match="'second' would have to be run"):
        fork(app, path, set=changes, run=["first"])
    assert (
        fork(app, path, set=changes, run="tools").values["messages"][-2].text
        == f"{len(changes['ann:1.words'])} letters"
    )


def test_what_a_function_has_noted_on_a_message_comes_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A message with the same words is handed on as that of the state: with what else has changed in it."""

    def note(state: Any) -> dict[str, Any]:
        question, answer = state["messages"]
        noted = {**answer.additional_kwargs, "approved": True}
        return {"messages": [question, answer.model_copy(update={"additional_kwargs": noted})]}

    def route(state: Any) -> str:
        return "bob" if state["messages"][1].additional_kwargs.get("approved") else "cleo"

    engine, path = make_engine(), tmp_path / "run.jsonl"
    graph = ChoreoGraph(visibility="shared").add_node("note", note)
    for name in ("ann", "bob", "cleo"):
        graph.add_node(Agent(name, sampling=FREE))
    graph.add_edge(START, "ann").add_edge("ann", "note").add_conditional_edges("note", route, ["bob", "cleo"])
    app = graph.compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    report = replay(app, path)
    assert report.same and [call.place[0] for call in report.calls] == ["ann", "bob"], report


def test_the_text_of_a_message_is_written_as_text(make_engine: MakeEngine, tmp_path: Path) -> None:
    """LangChain's `message.text` is of a class of its own."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = finding(lambda state: {"found": (state["messages"][-1].text, 1)}, nothing).compile(engine=engine)
    with engine.record(path):
        state = app.invoke(QUESTION)
    assert replay(app, path).same
    first, _ = read_recording(path).nodes()
    assert Packing(app.builder).unpacked(first.result or "") == {"found": (str(state["found"][0]), 1)}


def test_what_a_function_has_asked_a_confidential_agent_is_masked(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    ida = Agent("ida", confidential=True, sampling=FREE)
    inner = ChoreoGraph().add_node(ida).add_edge(START, "ida").compile(engine=engine)
    app = finding(lambda _: {"found": str(inner.invoke(QUESTION)["messages"][-1].text)}, nothing).compile(engine=engine)
    with engine.record(path):
        state = app.invoke(QUESTION)
    first, second = read_recording(path).nodes()
    assert state["found"] and (first.masked, first.result, first.calls) == (True, None, 1) and not second.masked
