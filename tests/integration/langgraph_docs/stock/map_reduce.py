"""Map-reduce: a topic becomes subjects, every subject a joke by a `Send` of its own, and one of the jokes is chosen."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

SUBJECTS = "Name subjects that belong to the topic."
BEST = "Repeat the best joke, and say whose it is."


class Subjects(BaseModel):
    subjects: list[str] = Field(max_length=4)


class State(MessagesState):
    found: dict[str, Any]


def asked(state):
    return f"Tell a joke about {state['subject']}."


def each_subject(state):
    return [Send("joker", {"subject": subject}) for subject in state["found"]["subjects"]]


def program(model):
    graph = StateGraph(State)

    def finder(state):
        found = model.with_structured_output(Subjects).invoke([SystemMessage(SUBJECTS), *state["messages"]])
        return {"found": found.model_dump()}

    def joker(state):
        return {"messages": [model.invoke([HumanMessage(asked(state))])]}

    def judge(state):
        return {"messages": [model.invoke([SystemMessage(BEST), *state["messages"]])]}

    graph.add_node("finder", finder)
    graph.add_node("joker", joker)
    graph.add_node("judge", judge)
    graph.add_edge(START, "finder")
    graph.add_conditional_edges("finder", each_subject, ["joker"])
    graph.add_edge("joker", "judge")
    graph.add_edge("judge", END)
    return graph.compile()
