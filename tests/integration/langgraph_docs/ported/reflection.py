"""Reflection: a writer's essay is criticised as if a person had written it, and the critique is told to the writer."""

from choreo_agents import END, START, Agent, ChoreoGraph

WRITE = "Write what you are asked for, and again when it was criticised."
CRITICISE = "Criticise what was written."


def again(state):
    return "critic" if len(state["messages"]) < 6 else END


def program(engine):
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(Agent("writer", system=WRITE))
    graph.add_node(Agent("critic", system=CRITICISE))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", again, ["critic", END])
    graph.add_edge("critic", "writer")
    return graph.compile(engine=engine)
