"""What recordings got wrong once: runs that they changed, words that they told, and differences that they missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from support.recorded import FREE, QUESTION

from choreo_agents import START, Agent, ChoreoGraph

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
