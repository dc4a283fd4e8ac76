"""Hierarchical teams: a head hands work to teams, graphs of their own, and hears what their last member says."""

from typing import Literal

from langchain_core.messages import HumanMessage
from langgraph.types import Command
from pydantic import BaseModel

from choreo_agents import END, START, Agent, ChoreoGraph

HEAD = "Say which team is to work next, research or writing, or __end__."
SEARCH, READ = "Search for what is asked.", "Say what was found, in short."
WRITE, CHECK = "Write what is asked.", "Correct what was written."

Next = Literal["research", "writing", "__end__"]


class Route(BaseModel):
    next: Next


def team(engine, one, other):
    graph = ChoreoGraph(visibility="shared")
    for name, system in (one, other):
        graph.add_node(Agent(name, system=system))
    graph.add_edge(START, one[0])
    graph.add_edge(one[0], other[0])
    graph.add_edge(other[0], END)
    return graph.compile(engine=engine)


def handed(state):
    return {"messages": [HumanMessage(each.text, name=each.name) for each in state["messages"] if each.type == "human"]}


def program(engine):
    graph = ChoreoGraph(visibility="shared")
    researchers = team(engine, ("searcher", SEARCH), ("reader", READ))
    writers = team(engine, ("writer", WRITE), ("checker", CHECK))

    def goto(said) -> Command[Next]:
        return Command(goto=said.additional_kwargs["parsed"]["next"])

    def research(state):
        said = researchers.invoke(handed(state))["messages"][-1]
        return {"messages": [HumanMessage(said.text, name="research")]}

    def writing(state):
        said = writers.invoke(handed(state))["messages"][-1]
        return {"messages": [HumanMessage(said.text, name="writing")]}

    graph.add_node(Agent("head", system=HEAD, response_format=Route, on_output=goto, confidential=True))
    graph.add_node("research", research)
    graph.add_node("writing", writing)
    graph.add_edge(START, "head")
    graph.add_edge("research", "head")
    graph.add_edge("writing", "head")
    return graph.compile(engine=engine)
