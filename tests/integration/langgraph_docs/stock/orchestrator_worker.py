"""Orchestrator and workers: one plans the sections of a report, workers write them at once, and one joins them."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

PLAN = "Plan the sections of the report."
WRITE = "Write the section that you are given, from what was noted."
JOIN = "Join the sections to a report."


class Plan(BaseModel):
    sections: list[str] = Field(max_length=4)


class State(MessagesState):
    plan: dict[str, Any]


def asked(state):
    return f"Write the section {state['section']!r}."


def each_section(state):
    return [Send("writer", {**state, "section": section}) for section in state["plan"]["sections"]]


def program(model):
    graph = StateGraph(State)

    def orchestrator(state):
        plan = model.with_structured_output(Plan).invoke([SystemMessage(PLAN), *state["messages"]])
        return {"plan": plan.model_dump()}

    def writer(state):
        said = model.invoke([SystemMessage(WRITE), *state["messages"], HumanMessage(asked(state))])
        return {"messages": [said]}

    def joiner(state):
        return {"messages": [model.invoke([SystemMessage(JOIN), *state["messages"]])]}

    graph.add_node("orchestrator", orchestrator)
    graph.add_node("writer", writer)
    graph.add_node("joiner", joiner)
    graph.add_edge(START, "orchestrator")
    graph.add_conditional_edges("orchestrator", each_section, ["writer"])
    graph.add_edge("writer", "joiner")
    graph.add_edge("joiner", END)
    return graph.compile()
