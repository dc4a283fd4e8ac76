"""ReAct: a model calls tools, one after the other or several at once, until it has its answer."""

from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode, tools_condition

from choreo_agents import START, Agent, ChoreoGraph

CALCULATE = "You calculate with the tools."


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def program(engine):
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(Agent("calculator", system=CALCULATE, tools=[add, multiply]))
    graph.add_node("tools", ToolNode([add, multiply]))
    graph.add_edge(START, "calculator")
    graph.add_conditional_edges("calculator", tools_condition)
    graph.add_edge("tools", "calculator")
    return graph.compile(engine=engine)
