"""A supervisor that sends control to its workers by `Command`, until it ends; all see what workers have said."""

from typing import Literal

from langgraph.types import Command
from pydantic import BaseModel

from choreo_agents import START, Agent, ChoreoGraph

SUPERVISE = "Say who is to work next: the researcher, the coder, or __end__ if all is done."
RESEARCH = "Find what is asked for. You do not calculate."
CODE = "Calculate with what was found."

Next = Literal["researcher", "coder", "__end__"]


class Route(BaseModel):
    next: Next


def program(engine):
    graph = ChoreoGraph(visibility="shared")

    def goto(said) -> Command[Next]:
        return Command(goto=said.additional_kwargs["parsed"]["next"])

    graph.add_node(Agent("supervisor", system=SUPERVISE, response_format=Route, on_output=goto, confidential=True))
    graph.add_node(Agent("researcher", system=RESEARCH))
    graph.add_node(Agent("coder", system=CODE))
    graph.add_edge(START, "supervisor")
    graph.add_edge("researcher", "supervisor")
    graph.add_edge("coder", "supervisor")
    return graph.compile(engine=engine)
