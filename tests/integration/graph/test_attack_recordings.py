"""What recordings got wrong once: runs that they changed, words that they told, and differences that they missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from support.recorded import FREE, QUESTION, Counted

from choreo_agents import START, Agent, ChoreoGraph, fork, replay
from choreo_agents.engine.recording import read_recording
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
    """Bob's superstep is lower than Ann's, and he reads what was made of her words."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = summarising(1).compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    assert [(call.author, call.superstep) for call in read_recording(path).calls()][1:] == [("ann", 2), ("bob", 1)]
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
    assert [call.superstep for call in said] == [2, 1, 1]
    assert [call_named(recording, "ann", number) for number in (1, 2, 3)] == said
