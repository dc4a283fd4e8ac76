"""Evaluator and optimizer: what one writes another grades, and it is written again until the grade is good."""

import json
from typing import Any, Literal

from langchain_core.messages import AIMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

WRITE = "Tell the joke that you are asked for, better than before if somebody has found a fault."
GRADE = "Grade the last joke, and say what would make it better."


class Grade(BaseModel):
    grade: Literal["funny", "dull"]
    advice: str


class State(MessagesState):
    grade: dict[str, Any]


def again(state):
    return "writer" if state["grade"]["grade"] == "dull" else END


def program(model):
    graph = StateGraph(State)

    def writer(state):
        return {"messages": [model.invoke([SystemMessage(WRITE), *state["messages"]])]}

    def grader(state):
        grade = model.with_structured_output(Grade).invoke([SystemMessage(GRADE), *state["messages"]])
        return {"grade": grade.model_dump(), "messages": [AIMessage(json.dumps(grade.model_dump()), name="grader")]}

    graph.add_node("writer", writer)
    graph.add_node("grader", grader)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "grader")
    graph.add_conditional_edges("grader", again, ["writer", END])
    return graph.compile()
