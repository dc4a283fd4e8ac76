"""A swarm: agents hand over to each other by calling a tool, and whoever is active goes on with the user."""

from typing import Annotated

from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolNode
from langgraph.types import Command

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState

FLIGHTS = "You book flights. Hand over what is about hotels."
HOTELS = "You book hotels. Hand over what is about flights."


class State(ChoreoState):
    active: str


def handed_over(name, call):
    told = ToolMessage(f"You are now with {name}.", tool_call_id=call)
    return Command(goto=name, update={"active": name, "messages": [told]})


@tool
def to_hotels(call: Annotated[str, InjectedToolCallId]):
    """Hand over to the one who books hotels."""
    return handed_over("hotels", call)


@tool
def to_flights(call: Annotated[str, InjectedToolCallId]):
    """Hand over to the one who books flights."""
    return handed_over("flights", call)


def active(state):
    return state.get("active") or "flights"


def calls(state):
    return "tools" if state["messages"][-1].tool_calls else END


def program(engine):
    graph = ChoreoGraph(State, visibility="shared")
    graph.add_node(Agent("flights", system=FLIGHTS, tools=[to_hotels]))
    graph.add_node(Agent("hotels", system=HOTELS, tools=[to_flights]))
    graph.add_node("tools", ToolNode([to_hotels, to_flights]), destinations=("flights", "hotels"))
    graph.add_conditional_edges(START, active, ["flights", "hotels"])
    graph.add_conditional_edges("flights", calls, ["tools", END])
    graph.add_conditional_edges("hotels", calls, ["tools", END])
    return graph.compile(checkpointer=InMemorySaver(), engine=engine)
