"""A person in the loop: a draft stops for review, where it is edited in the state; what is sent is made of the edit."""

from langchain_core.messages import SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

DRAFT = "Draft a letter."
SEND = "Write the letter as it was reviewed, with a greeting."


def review(state):
    interrupt({"draft": state["messages"][-1].text})
    return {}


def program(model):
    graph = StateGraph(MessagesState)

    def drafter(state):
        return {"messages": [model.invoke([SystemMessage(DRAFT), *state["messages"]])]}

    def sender(state):
        return {"messages": [model.invoke([SystemMessage(SEND), *state["messages"]])]}

    graph.add_node("drafter", drafter)
    graph.add_node("review", review)
    graph.add_node("sender", sender)
    graph.add_edge(START, "drafter")
    graph.add_edge("drafter", "review")
    graph.add_edge("review", "sender")
    graph.add_edge("sender", END)
    return graph.compile(checkpointer=InMemorySaver())
