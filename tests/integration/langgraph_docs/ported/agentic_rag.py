"""Agentic RAG: a model searches or answers, what was found is graded, and the question is asked anew if need be."""

from typing import Literal

from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

from choreo_agents import END, START, Agent, ChoreoGraph

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


def program(engine):
    graph = ChoreoGraph(visibility="shared")

    def goto(said) -> Command[Next]:
        return Command(goto=said.additional_kwargs["parsed"]["next"])

    graph.add_node(Agent("asker", system=ASK, tools=[search]))
    graph.add_node("tools", ToolNode([search]))
    graph.add_node(
        Agent("grader", system=GRADE, prompt=asked, response_format=Grade, on_output=goto, history=0, confidential=True)
    )
    graph.add_node(Agent("rewriter", prompt=anew, history=0))
    graph.add_node(Agent("answerer", system=ANSWER))
    graph.add_edge(START, "asker")
    graph.add_conditional_edges("asker", tools_condition, ["tools", END])
    graph.add_edge("tools", "grader")
    graph.add_edge("rewriter", "asker")
    graph.add_edge("answerer", END)
    return graph.compile(engine=engine)
