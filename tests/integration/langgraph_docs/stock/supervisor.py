"""A supervisor that sends control to its workers by `Command`, until it ends; all see what workers have said."""

from typing import Literal

from langchain_core.messages import AIMessage, SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

SUPERVISE = "Say who is to work next: the researcher, the coder, or __end__ if all is done."
RESEARCH = "Find what is asked for. You do not calculate."
CODE = "Calculate with what was found."

Next = Literal["researcher", "coder", "__end__"]


class Route(BaseModel):
    next: Next


def program(model):
    graph = StateGraph(MessagesState)

    def supervisor(state) -> Command[Next]:
        route = model.with_structured_output(Route).invoke([SystemMessage(SUPERVISE), *state["messages"]])
        return Command(goto=route.next)

    def researcher(state):
        said = model.invoke([SystemMessage(RESEARCH), *state["messages"]])
        return {"messages": [AIMessage(said.text, name="researcher")]}

    def coder(state):
        said = model.invoke([SystemMessage(CODE), *state["messages"]])
        return {"messages": [AIMessage(said.text, name="coder")]}

    graph.add_node("supervisor", supervisor)
    graph.add_node("researcher", researcher)
    graph.add_node("coder", coder)
    graph.add_edge(START, "supervisor")
    graph.add_edge("researcher", "supervisor")
    graph.add_edge("coder", "supervisor")
    return graph.compile()
