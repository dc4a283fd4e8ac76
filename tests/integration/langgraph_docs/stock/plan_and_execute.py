"""Plan and execute: a planner lists steps, an executor does the first of them, and a replanner says what is left."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, Field

PLAN = "List the steps that lead to the answer."
EXECUTE = "Do the step that you are given."
REPLAN = "Say which steps are left after what was done; none, and the answer, if it is known."


class Plan(BaseModel):
    steps: list[str] = Field(max_length=4)


class Replan(BaseModel):
    steps: list[str] = Field(max_length=4)
    answer: str


class State(MessagesState):
    plan: dict[str, Any]


def asked(state):
    return f"The plan is: {'; '.join(state['plan']['steps'])}. Do its first step."


def again(state):
    return "executor" if state["plan"]["steps"] else END


def program(model):
    graph = StateGraph(State)

    def planner(state):
        plan = model.with_structured_output(Plan).invoke([SystemMessage(PLAN), *state["messages"]])
        return {"plan": plan.model_dump()}

    def executor(state):
        return {"messages": [model.invoke([SystemMessage(EXECUTE), HumanMessage(asked(state))])]}

    def replanner(state):
        plan = model.with_structured_output(Replan).invoke([SystemMessage(REPLAN), *state["messages"]])
        return {"plan": plan.model_dump()}

    graph.add_node("planner", planner)
    graph.add_node("executor", executor)
    graph.add_node("replanner", replanner)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "executor")
    graph.add_edge("executor", "replanner")
    graph.add_conditional_edges("replanner", again, ["executor", END])
    return graph.compile()
