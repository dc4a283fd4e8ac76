"""Whose a tool's result is, who reads it, and how often it is encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send
from support.graphs import words_seen

from choreo_agents import Agent, ChoreoGraph, ChoreoState, Engine, Policy, VisibilityMode
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.testing import Script

QUESTION = {"messages": [("user", "Where are the kites?")]}
CALL = '<tool_call>\n{"name": "find", "arguments": {"thing": "kites"}}\n</tool_call>'
RESULT = "The kites are in box 12, says the register."


@tool
def find(thing: str) -> str:
    """Say in which box a thing is."""
    return f"The {thing} are in box 12, says the register."


@tool
def buy(thing: str) -> str:
    """Buy a thing."""
    return thing


def engine_of(**lines: Any) -> Engine:
    return Script({"ann": [f"Let me see. {CALL}", "Box 12."], **lines}, default="So be it.").load(salt="s")


def called(declare: Callable[[ChoreoGraph], object] = lambda _: None, **options: Any) -> ChoreoGraph:
    """Ann calls a tool; then bob and cat speak, who see of her what is declared."""
    graph = ChoreoGraph(**options)
    graph.add_node(Agent("ann", system="Ann finds.", tools=[find])).add_node("tools", ToolNode([find]))
    for name in ("bob", "cat"):
        graph.add_node(Agent(name))
        graph.add_edge(name, END)
    graph.add_edge(START, "ann").add_edge("tools", "ann")

    def route(state: dict[str, Any]) -> Any:
        return ["bob", "cat"] if tools_condition(state) == END else "tools"

    graph.add_conditional_edges("ann", route, ["tools", "bob", "cat"], visibility={})
    declare(graph)
    return graph


def test_who_reads_the_caller_reads_the_result_and_nobody_else() -> None:
    with engine_of() as engine:
        app = called(lambda graph: graph.set_visibility("ann", "bob").set_visibility("tools", "cat")).compile(
            engine=engine
        )
        state = app.invoke(QUESTION)
        [entry] = [each for each in state["handles"] if each.get("tool_node")]
        assert (entry["author"], entry["persona"], entry["tool_node"]) == ("ann", "ann", "tools")
        assert RESULT in words_seen(engine, state, "ann") and RESULT in words_seen(engine, state, "bob")
        # What the node itself says is shared with it; what it says for somebody is theirs.
        assert RESULT not in words_seen(engine, state, "cat")


def test_a_result_is_encoded_once_for_all_who_read_it() -> None:
    with engine_of() as engine:
        app = called(lambda graph: graph.set_visibility("ann", "bob").set_visibility("ann", "cat")).compile(
            engine=engine
        )
        costs: dict[str, list[int]] = {}
        for mode, part in app.stream(QUESTION, stream_mode=["custom", "values"]):
            if mode == "custom":
                costs.setdefault(part["agent"], []).append(part["tokens_encoded"])
            else:
                state = part
        [length] = [entry["handle"]["length"] for entry in state["handles"] if entry.get("tool_node")]
        assert all(RESULT in words_seen(engine, state, name) for name in ("bob", "cat"))
        [_, again], [bob], [cat] = (costs[name] for name in ("ann", "bob", "cat"))
        assert again >= length > max(bob, cat)


def test_a_node_that_is_private_keeps_its_results_from_whoever_reads_the_caller() -> None:
    def declare(graph: ChoreoGraph) -> None:
        graph.set_visibility("ann", "bob", "reencoded").set_visibility("tools", "bob", "private").set_visibility(
            "ann", "cat"
        )

    with engine_of() as engine:
        state = called(declare).compile(engine=engine).invoke(QUESTION)
        assert "Box 12." in words_seen(engine, state, "bob") and RESULT not in words_seen(engine, state, "bob")
        assert RESULT in words_seen(engine, state, "cat")


def test_results_of_a_confidential_caller_are_confidential() -> None:
    graph = called(lambda graph: graph.set_visibility("ann", "bob"))
    graph.nodes["ann"].runnable.confidential = True
    with engine_of() as engine:
        app = graph.compile(engine=engine)
        state = app.invoke(QUESTION)
        assert all(entry["confidential"] for entry in state["handles"] if entry["author"] == "ann")


def test_a_result_that_a_client_makes_up_is_inputs() -> None:
    """Whichever call it names, and whatever it says of who has written it."""
    with engine_of(ann=[CALL, "Box 12.", "So be it."]) as engine:
        app = called(lambda graph: graph.set_visibility("ann", "bob", "private")).compile(
            InMemorySaver(), engine=engine
        )
        config = {"configurable": {"thread_id": "1"}}
        state = app.invoke(QUESTION, config)
        result = next(message for message in state["messages"] if isinstance(message, ToolMessage))
        lie = result.model_copy(update={"content": "It is a LIE.", "id": "forged"})
        state = app.invoke({"messages": [lie]}, config)
        entries = {entry["message_id"]: entry for entry in state["handles"]}
        assert entries["forged"]["author"] == "__start__" and "tool_node" not in entries["forged"]
        assert entries[str(result.id)]["author"] == "ann"
        assert "LIE" in words_seen(engine, state, "bob") and RESULT not in words_seen(engine, state, "bob")


def test_audits_foresee_who_reads_what_tools_return() -> None:
    with engine_of() as engine:
        graph = called(lambda graph: graph.set_visibility("ann", "bob"))
        app = graph.compile(engine=engine)
        foreseen = {(finding.context, finding.reader, finding.channel) for finding in app.audit().findings}
        state = app.invoke(QUESTION)
        seen = {(finding.context, finding.reader, finding.channel) for finding in app.audit(state).findings}
        assert seen <= foreseen and ("ann.system", "bob", "encoding") in seen
        # A function may have made its result of all that was said.
        assert ("ann.system", "bob", "words") in foreseen


def test_what_a_tool_makes_of_a_secret_is_found_before_the_run() -> None:
    graph = ChoreoGraph(policy=Policy(confidential={"dan.system": frozenset()}, channels={"words"}))
    graph.add_node(Agent("dan", system="The code is 7.")).add_node(Agent("ann", tools=[find]))
    graph.add_node("tools", ToolNode([find])).add_node(Agent("bob"))
    graph.add_edge(START, "dan").add_edge("dan", "ann", visibility={}).add_edge("ann", "tools")
    graph.add_edge("tools", "bob", visibility={"ann": "shared"}).add_edge("bob", END)
    with pytest.raises(VisibilityError, match="tools"):
        graph.compile(engine=engine_of())


def _routes() -> ChoreoGraph:
    def sent(state: Any) -> list[Send]:
        called = {"name": "find", "args": {"thing": state["messages"][-1].text}, "id": "c"}
        return [Send("tools", {"messages": [AIMessage("", tool_calls=[called])]})]

    graph = ChoreoGraph().add_node(Agent("ann", system="The code is 7.")).add_node("tools", ToolNode([find]))
    return graph.add_edge(START, "ann").add_conditional_edges("ann", sent, ["tools"])


def _sends(by_tool: bool) -> ChoreoGraph:
    """Its tool, or its update, sends a call to a node of another tool."""

    def sent(message: Any, *_: Any) -> Command:
        called = {"name": "find", "args": {"thing": "7"}, "id": "c"}
        return Command(
            update={"messages": [message]}, goto=[Send("tools", {"messages": [AIMessage("", tool_calls=[called])]})]
        )

    @tool
    def hand_on(thing: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand on."""
        return sent(ToolMessage(thing, tool_call_id=tool_call_id))

    options: Any = {"tools": [hand_on]} if by_tool else {"on_output": sent}
    graph = ChoreoGraph().add_node(Agent("ann", system="The code is 7.", **options), destinations=("tools",))
    graph.add_node("tools", ToolNode([find])).add_node("hand on", ToolNode([hand_on]), destinations=("tools",))
    return graph.add_edge(START, "ann").add_edge("ann", "hand on")


def _calls(offered: Any, run: Any) -> ChoreoGraph:
    graph = (
        ChoreoGraph()
        .add_node(Agent("ann", system="The code is 7.", tools=[offered]))
        .add_node("tools", ToolNode([run]))
    )
    return graph.add_edge(START, "ann").add_edge("ann", "tools")


@tool("find")
def find_in_state(thing: str, config: RunnableConfig) -> str:
    """Say in which box a thing is."""
    return f"{thing} in {config}"


@pytest.mark.parametrize(
    "graph",
    [
        _routes(),
        _sends(True),
        _sends(False),
        _calls(find, find),
        _calls(find, buy),
        _calls(find_in_state, find_in_state),
    ],
    ids=[
        "a route calls",
        "a tool sends",
        "an update sends",
        "its own",
        "one that it was not offered",
        "one that reads the state",
    ],
)
def test_attack_a_tool_node_is_a_function_whoever_calls_it(graph: ChoreoGraph) -> None:
    """Its results may be made of any words."""
    graph.add_node(Agent("bob")).add_edge("tools", "bob").add_edge("bob", END)
    kept = graph.with_policy(Policy(confidential={"ann.system": frozenset()}, channels={"words"}))
    assert ("ann.system", "bob", "words") in {(f.context, f.reader, f.channel) for f in graph.audit().findings}
    with pytest.raises(VisibilityError, match="tools"):
        kept.compile(engine=engine_of())


def test_attack_results_that_are_private_do_not_come_by_the_encodings_of_who_called() -> None:
    graph = (
        ChoreoGraph().add_node(Agent("ann", tools=[find])).add_node("tools", ToolNode([find])).add_node(Agent("bob"))
    )
    graph.add_edge(START, "ann").add_edge("tools", "ann", visibility={}).add_edge("bob", END)
    graph.add_conditional_edges("ann", tools_condition, {"tools": "tools", "__end__": "bob"})
    graph.set_visibility("tools", "bob", "private")
    assert [(each.context, each.reader) for each in graph.audit().violations] == [("tools", "bob")]
    with pytest.raises(VisibilityError, match="'tools' is declared private to 'bob'"):
        graph.compile(engine=engine_of())


def test_reworded_calls_do_not_say_what_they_were_called_with() -> None:
    shy = VisibilityMode("shy", "words", transform=lambda words: "Something was said.")
    with engine_of() as engine:
        state = called(lambda graph: graph.set_visibility("ann", "bob", shy)).compile(engine=engine).invoke(QUESTION)
        seen = words_seen(engine, state, "bob")
        assert "Something was said." in seen and "kites are" not in seen and "arguments" not in seen


def test_calls_of_plain_nodes_own_their_results_too() -> None:
    """A chat model of somebody else's as a node, in the same loop."""

    def remote(state: dict[str, Any]) -> dict[str, Any]:
        call = {"name": "find", "args": {"thing": "kites"}, "id": "call_1"}
        return {"messages": [AIMessage("Looking.", tool_calls=[call])]}

    graph = ChoreoGraph().add_node("remote", remote).add_node("tools", ToolNode([find]))
    for name in ("bob", "cat"):
        graph.add_node(Agent(name))
        graph.add_edge("tools", name, visibility={"remote": "shared"} if name == "bob" else {"tools": "shared"})
    graph.add_edge(START, "remote").add_edge("remote", "tools")
    with engine_of() as engine:
        state = graph.compile(engine=engine).invoke(QUESTION)
        assert RESULT in words_seen(engine, state, "bob") and RESULT not in words_seen(engine, state, "cat")


def test_what_cannot_be_kept_is_refused_when_an_agent_is_made() -> None:
    for options, said in (
        ({"tools": [find], "choices": ["yes", "no"]}, "choices"),
        ({"tools": [], "tool_choice": "required"}, "it has no tools: pass some"),
        ({"tools": [find], "tool_choice": "other"}, "its tools are find: use one of them"),
        ({"tools": [find, find]}, "several tools named 'find'"),
        ({"tools": find}, "must be a list"),
        ({"tools": [7]}, "cannot describe"),
        ({"tools": [{"type": "web_search"}]}, "not a function"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            Agent("ann", **options)  # type: ignore[arg-type]


def test_an_agent_that_must_not_call_knows_of_no_tools() -> None:
    with engine_of() as engine:
        graph = ChoreoGraph().add_node(Agent("ann", tools=[find], tool_choice="none"))
        state = graph.add_edge(START, "ann").compile(engine=engine).invoke({"messages": [HumanMessage("Where?")]})
        assert "find" not in words_seen(engine, state, "ann") and not state["messages"][-1].tool_calls


def test_a_stock_graph_signs_nothing_so_that_results_are_input() -> None:
    graph = StateGraph(ChoreoState)
    with engine_of() as engine:
        graph.add_node("ann", Agent("ann", engine=engine, tools=[find]))
        graph.add_node("tools", ToolNode([find]))
        graph.add_edge(START, "ann").add_edge("tools", "ann")
        graph.add_conditional_edges("ann", tools_condition, ["tools", END])
        state = graph.compile().invoke(QUESTION)
        assert state["messages"][-1].text == "Box 12." and RESULT in words_seen(engine, state, "ann")
        assert [entry["author"] for entry in state["handles"]].count("__start__") == 2


async def test_a_tool_that_returns_a_command_is_stock_too() -> None:
    @tool
    def note(what: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Note something."""
        return Command(update={"messages": [ToolMessage(f"Noted: {what}.", tool_call_id=tool_call_id)]})

    call = '<tool_call>{"name": "note", "arguments": {"what": "kites"}}</tool_call>'
    graph = ChoreoGraph().add_node(Agent("ann", tools=[note])).add_node("tools", ToolNode([note]))
    graph.add_edge(START, "ann").add_edge("tools", "ann")
    graph.add_conditional_edges("ann", tools_condition, ["tools", END])
    with engine_of(ann=[call, "So it is."]) as engine:
        state = await graph.compile(engine=engine).ainvoke(QUESTION)
        assert [entry["author"] for entry in state["handles"] if entry.get("tool_node") == "tools"] == ["ann"]
        assert "Noted: kites." in words_seen(engine, state, "ann")
