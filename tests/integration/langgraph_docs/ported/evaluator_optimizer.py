"""Evaluator and optimizer: what one writes another grades, and it is written again until the grade is good."""

from typing import Any, Literal

from pydantic import BaseModel

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState

WRITE = "Tell the joke that you are asked for, better than before if somebody has found a fault."
GRADE = "Grade the last joke, and say what would make it better."


class Grade(BaseModel):
    grade: Literal["funny", "dull"]
    advice: str


class State(ChoreoState):
    grade: dict[str, Any]


def again(state):
    return "writer" if state["grade"]["grade"] == "dull" else END


def program(engine):
    graph = ChoreoGraph(State, visibility="shared")
    graph.add_node(Agent("writer", system=WRITE))
    graph.add_node(Agent("grader", system=GRADE, response_format=Grade, output_key="grade"))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "grader")
    graph.add_conditional_edges("grader", again, ["writer", END])
    return graph.compile(engine=engine)
