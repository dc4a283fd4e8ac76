"""Map-reduce: a topic becomes subjects, every subject a joke by a `Send` of its own, and one of the jokes is chosen."""

from typing import Any

from langgraph.types import Send
from pydantic import BaseModel, Field

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState

SUBJECTS = "Name subjects that belong to the topic."
BEST = "Repeat the best joke, and say whose it is."


class Subjects(BaseModel):
    subjects: list[str] = Field(max_length=4)


class State(ChoreoState):
    found: dict[str, Any]


def asked(state):
    return f"Tell a joke about {state['subject']}."


def each_subject(state):
    return [Send("joker", {"subject": subject}) for subject in state["found"]["subjects"]]


def program(engine):
    graph = ChoreoGraph(State, visibility="shared")
    graph.add_node(Agent("finder", system=SUBJECTS, response_format=Subjects, output_key="found", confidential=True))
    graph.add_node(Agent("joker", prompt=asked))
    graph.add_node(Agent("judge", system=BEST))
    graph.add_edge(START, "finder")
    graph.add_conditional_edges("finder", each_subject, ["joker"])
    graph.add_edge("joker", "judge")
    graph.add_edge("judge", END)
    return graph.compile(engine=engine)
