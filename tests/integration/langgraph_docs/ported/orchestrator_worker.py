"""Orchestrator and workers: one plans the sections of a report, workers write them at once, and one joins them."""

from typing import Any

from langgraph.types import Send
from pydantic import BaseModel, Field

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState

PLAN = "Plan the sections of the report."
WRITE = "Write the section that you are given, from what was noted."
JOIN = "Join the sections to a report."


class Plan(BaseModel):
    sections: list[str] = Field(max_length=4)


class State(ChoreoState):
    plan: dict[str, Any]


def asked(state):
    return f"Write the section {state['section']!r}."


def each_section(state):
    return [Send("writer", {**state, "section": section}) for section in state["plan"]["sections"]]


def program(engine):
    graph = ChoreoGraph(State, visibility="shared")
    graph.add_node(Agent("orchestrator", system=PLAN, response_format=Plan, output_key="plan", confidential=True))
    graph.add_node(Agent("writer", system=WRITE, prompt=asked))
    graph.add_node(Agent("joiner", system=JOIN))
    graph.add_edge(START, "orchestrator")
    graph.add_conditional_edges("orchestrator", each_section, ["writer"])
    graph.add_edge("writer", "joiner")
    graph.add_edge("joiner", END)
    return graph.compile(engine=engine)
