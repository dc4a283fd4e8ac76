"""Hierarchical teams: a head hands work to teams, graphs of their own, and hears what their last member says."""

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

HEAD = "Say which team is to work next, research or writing, or __end__."
SEARCH, READ = "Search for what is asked.", "Say what was found, in short."
WRITE, CHECK = "Write what is asked.", "Correct what was written."

Next = Literal["research", "writing", "__end__"]


class Route(BaseModel):
    next: Next


def member(model, name, system):
    def speak(state):
        return {"messages": [AIMessage(model.invoke([SystemMessage(system), *state["messages"]]).text, name=name)]}

    return speak


def team(model, one, other):
    graph = StateGraph(MessagesState)
    for name, system in (one, other):
        graph.add_node(name, member(model, name, system))
    graph.add_edge(START, one[0])
    graph.add_edge(one[0], other[0])
    graph.add_edge(other[0], END)
    return graph.compile()


def program(model):
    graph = StateGraph(MessagesState)
    researchers = team(model, ("searcher", SEARCH), ("reader", READ))
    writers = team(model, ("writer", WRITE), ("checker", CHECK))

    def head(state) -> Command[Next]:
        route = model.with_structured_output(Route).invoke([SystemMessage(HEAD), *state["messages"]])
        return Command(goto=route.next)

    def research(state):
        said = researchers.invoke({"messages": state["messages"]})["messages"][-1]
        return {"messages": [HumanMessage(said.text, name="research")]}

    def writing(state):
        said = writers.invoke({"messages": state["messages"]})["messages"][-1]
        return {"messages": [HumanMessage(said.text, name="writing")]}

    graph.add_node("head", head)
    graph.add_node("research", research)
    graph.add_node("writing", writing)
    graph.add_edge(START, "head")
    graph.add_edge("research", "head")
    graph.add_edge("writing", "head")
    return graph.compile()
