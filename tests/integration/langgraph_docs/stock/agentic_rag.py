"""Agentic RAG: a model searches or answers, what was found is graded, and the question is asked anew if need be."""

from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

ASK = "Search if you must, or answer at once."
GRADE = "Say whether what was found has to do with the question."
ANSWER = "Answer from what was found."
BOXES = {"kites": "The red kites are in box 12.", "attic": "The attic has a window."}

Next = Literal["rewriter", "answerer"]


class Grade(BaseModel):
    next: Next


@tool
def search(words: str) -> str:
    """Search the notes."""
    return " ".join(note for key, note in BOXES.items() if key in words)


def asked(state):
    question, found = state["messages"][0].text, state["messages"][-1].text
    return f"Question: {question} Found: {found} Go on with the answerer, or with the rewriter if it does not fit?"


def anew(state):
    return f"Ask this so that the notes are likely to have it: {state['messages'][0].text}"


def program(model):
    graph = StateGraph(MessagesState)

    def asker(state):
        return {"messages": [model.bind_tools([search]).invoke([SystemMessage(ASK), *state["messages"]])]}

    def grader(state) -> Command[Next]:
        grade = model.with_structured_output(Grade).invoke([SystemMessage(GRADE), HumanMessage(asked(state))])
        return Command(goto=grade.next)

    def rewriter(state):
        said = model.invoke([HumanMessage(anew(state))])
        return {"messages": [HumanMessage(said.text, name="rewriter")]}

    def answerer(state):
        return {"messages": [model.invoke([SystemMessage(ANSWER), *state["messages"]])]}

    graph.add_node("asker", asker)
    graph.add_node("tools", ToolNode([search]))
    graph.add_node("grader", grader)
    graph.add_node("rewriter", rewriter)
    graph.add_node("answerer", answerer)
    graph.add_edge(START, "asker")
    graph.add_conditional_edges("asker", tools_condition, ["tools", END])
    graph.add_edge("tools", "grader")
    graph.add_edge("rewriter", "asker")
    graph.add_edge("answerer", END)
    return graph.compile()
