"""ReAct: a model calls tools, one after the other or several at once, until it has its answer."""

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

CALCULATE = "You calculate with the tools."


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def program(model):
    graph = StateGraph(MessagesState)

    def calculator(state):
        calling = model.bind_tools([add, multiply])
        return {"messages": [calling.invoke([SystemMessage(CALCULATE), *state["messages"]])]}

    graph.add_node("calculator", calculator)
    graph.add_node("tools", ToolNode([add, multiply]))
    graph.add_edge(START, "calculator")
    graph.add_conditional_edges("calculator", tools_condition)
    graph.add_edge("tools", "calculator")
    return graph.compile()
