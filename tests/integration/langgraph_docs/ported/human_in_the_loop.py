"""A person in the loop: a draft stops for review, where it is edited in the state; what is sent is made of the edit."""

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from choreo_agents import END, START, Agent, ChoreoGraph

DRAFT = "Draft a letter."
SEND = "Write the letter as it was reviewed, with a greeting."


def review(state):
    interrupt({"draft": state["messages"][-1].text})
    return {}


def program(engine):
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(Agent("drafter", system=DRAFT))
    graph.add_node("review", review)
    graph.add_node(Agent("sender", system=SEND))
    graph.add_edge(START, "drafter")
    graph.add_edge("drafter", "review")
    graph.add_edge("review", "sender")
    graph.add_edge("sender", END)
    return graph.compile(checkpointer=InMemorySaver(), engine=engine)
