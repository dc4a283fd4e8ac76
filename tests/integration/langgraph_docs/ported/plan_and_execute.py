"""Plan and execute: a planner lists steps, an executor does the first of them, and a replanner says what is left."""

from typing import Any

from pydantic import BaseModel, Field

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState

PLAN = "List the steps that lead to the answer."
EXECUTE = "Do the step that you are given."
REPLAN = "Say which steps are left after what was done; none, and the answer, if it is known."


class Plan(BaseModel):
    steps: list[str] = Field(max_length=4)


class Replan(BaseModel):
    steps: list[str] = Field(max_length=4)
    answer: str


class State(ChoreoState):
    plan: dict[str, Any]


def asked(state):
    return f"The plan is: {'; '.join(state['plan']['steps'])}. Do its first step."


def again(state):
    return "executor" if state["plan"]["steps"] else END


def program(engine):
    graph = ChoreoGraph(State, visibility="shared")
    graph.add_node(Agent("planner", system=PLAN, response_format=Plan, output_key="plan", confidential=True))
    graph.add_node(Agent("executor", system=EXECUTE, prompt=asked, history=0))
    graph.add_node(Agent("replanner", system=REPLAN, response_format=Replan, output_key="plan", confidential=True))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "executor")
    graph.add_edge("executor", "replanner")
    graph.add_conditional_edges("replanner", again, ["executor", END])
    return graph.compile(engine=engine)
