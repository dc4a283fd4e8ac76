"""A call and its results are in a view together, or not at all, whatever bounds the view."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolNode

from choreo_agents import END, START, Agent, ChoreoGraph, VisibilityRule
from choreo_agents.graph import HistoryLimit, send
from choreo_agents.testing import Script

BOUNDS = st.builds(HistoryLimit, last=st.integers(0, 8)) | st.builds(HistoryLimit, tokens=st.integers(1, 900))


@tool
def find(thing: str) -> str:
    """Find a thing."""
    return f"{thing} found"


def history(turns: list[int]) -> list[AnyMessage]:
    """A turn for each number: so many calls at once, with their results; 0: words."""
    said: list[AnyMessage] = [HumanMessage("Find all of it.")]
    for turn, calls in enumerate(turns):
        made: list[Any] = [{"name": "find", "args": {"thing": f"t{turn}c{n}"}, "id": f"id{n}"} for n in range(calls)]
        said.append(AIMessage(f"turn {turn}", tool_calls=made))  # ids come again, as some providers have it
        said += [ToolMessage(f"t{turn}c{n} found", tool_call_id=f"id{n}") for n in range(calls)]
        said += [HumanMessage("Go on.")] if calls != 1 else []
    return said


def require_whole(seen: str, turns: list[int]) -> None:
    for turn, calls in enumerate(turns):
        parts = [f"turn {turn}", *(f"t{turn}c{n} found" for n in range(calls))]
        assert len({part in seen for part in parts}) == 1, f"{parts} are torn in {seen!r}"


@given(turns=st.lists(st.integers(0, 3), min_size=1, max_size=4), bound=BOUNDS, ends=st.booleans())
@settings(max_examples=12)
def test_a_bounded_view_tears_no_call_from_its_result(turns: list[int], bound: HistoryLimit, ends: bool) -> None:
    script = Script({"ann": "Done."})
    graph = ChoreoGraph().add_node(Agent("ann", history=bound)).add_edge(START, "ann")
    with script.load() as engine:
        given = history(turns)
        graph.compile(engine=engine).invoke({"messages": given if ends else given[:-1] or given})
    [seen] = script.calls
    if ends or turns[-1] != 1:
        require_whole(seen.text, turns)
    if bound.last:
        assert given[-1 if ends else -2].text in seen.text, "the latest is seen"


@pytest.mark.parametrize("most", [1, 2, 3, "last"])
def test_so_is_the_history_of_an_edge(most: Any) -> None:
    """Results are said when their call is."""
    turns = [1, 2, 1]
    script = Script({"ann": "Done."})
    agent = Agent("ann", reads={START: VisibilityRule("reencoded", history=most)})
    graph = ChoreoGraph().add_node(agent).add_edge(START, "ann")
    with script.load() as engine:
        graph.compile(engine=engine).invoke({"messages": history(turns)})
    require_whole(script.calls[0].text, turns)


@pytest.mark.parametrize("most", [1, 2, "all"])
@pytest.mark.parametrize("of_input", [1, 2, "all"])
def test_so_are_a_call_and_its_result_from_two_sources(most: Any, of_input: Any) -> None:
    """A person answers the calls of an agent, whom another agent reads."""
    said = [f'turn {n}<tool_call>{{"name": "find", "arguments": {{"thing": "t{n}"}}}}</tool_call>' for n in range(3)]
    script = Script({"ann": said, "bob": "Seen."})
    bob = Agent(
        "bob",
        reads={START: VisibilityRule("reencoded", history=of_input), "ann": VisibilityRule("reencoded", history=most)},
    )
    graph = ChoreoGraph().add_node(Agent("ann", tools=[find])).add_node(bob)
    graph.add_edge(START, "ann").add_edge("ann", "bob")
    with script.load() as engine:
        app = graph.compile(engine=engine, checkpointer=InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "t"}}
        state = app.invoke({"messages": [HumanMessage("Find all of it.")]}, thread)
        for turn in range(2):
            called = next(
                each for each in reversed(state["messages"]) if isinstance(each, AIMessage) and each.tool_calls
            )
            answer = ToolMessage(f"t{turn}c0 found", tool_call_id=called.tool_calls[0]["id"])
            state = app.invoke({"messages": [answer]}, thread)
    for answered, seen in enumerate(script.calls[1::2]):
        for turn in range(answered):
            assert (f"turn {turn}" in seen.text) == (f"t{turn}c0 found" in seen.text), seen.text


def test_a_send_may_hand_on_a_call_with_its_result() -> None:
    """Where a history allows the latest, that is both."""
    call = '<tool_call>{"name": "find", "arguments": {"thing": "t0"}}</tool_call>'
    script = Script({"ann": [call, "Done."], "bob": "Seen."})
    graph = ChoreoGraph()
    graph.add_node(Agent("ann", tools=[find])).add_node(
        Agent("bob", reads={"ann": VisibilityRule("shared", history=2)})
    )
    graph.add_node("tools", ToolNode([find])).add_edge(START, "ann").add_edge("tools", "ann").add_edge("bob", END)

    def route(state: Any) -> Any:
        if state["messages"][-1].tool_calls:
            return "tools"
        return send("bob", state, shared=[each.id for each in state["messages"][1:]])

    graph.add_conditional_edges("ann", route, ["tools", "bob"])
    with script.load() as engine:
        graph.compile(engine=engine).invoke({"messages": [HumanMessage("Find it.")]})
    assert call in script.calls[-1].text
    assert "t0 found" in script.calls[-1].text
