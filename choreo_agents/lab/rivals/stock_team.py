"""A team as LangGraph's documentation has it: a supervisor, two workers and a writer, who are sent all messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command


def team(chat: Any, told: Mapping[str, str]) -> StateGraph[Any, Any, Any, Any]:
    """The graph, over a chat model; `told` are system prompts by name."""

    def supervisor(state: MessagesState) -> Command[Literal["Alice", "Bruno", "Clara"]]:
        said = chat.invoke([SystemMessage(told["supervisor"]), *state["messages"]])
        return Command(goto=said.text)

    def alice(state: MessagesState) -> dict[str, Any]:
        said = chat.invoke([SystemMessage(told["Alice"]), *state["messages"]])
        return {"messages": [HumanMessage(f"Alice: {said.text}")]}

    def bruno(state: MessagesState) -> dict[str, Any]:
        said = chat.invoke([SystemMessage(told["Bruno"]), *state["messages"]])
        return {"messages": [HumanMessage(f"Bruno: {said.text}")]}

    def clara(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke([SystemMessage(told["Clara"]), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor)
    graph.add_node("Alice", alice)
    graph.add_node("Bruno", bruno)
    graph.add_node("Clara", clara)
    graph.add_edge(START, "supervisor")
    graph.add_edge("Alice", "supervisor")
    graph.add_edge("Bruno", "supervisor")
    graph.add_edge("Clara", END)
    return graph


def memory() -> InMemorySaver:
    """What a team remembers its threads with."""
    return InMemorySaver()
