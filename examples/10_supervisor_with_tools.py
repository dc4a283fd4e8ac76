"""A supervisor with tools: the loop, `tool` and `ToolNode` are LangGraph's own; only the messages are choreographed.

The embedded model is far too small to write tool calls. Asked where a thing is, it names the thing, and perhaps a box
that it made up. A route takes that for a call, and when the tool has answered, the supervisor is asked again. A model
that is told of tools calls them itself: `Agent("Alice", tools=[find])`, with LangGraph's `tools_condition` as route.
"""

from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Sampling

BOXES = {"kites": 12, "bells": 31, "masks": 5}


@tool
def find(thing: str) -> str:
    """Say in which box a thing is."""
    return f"Find {thing}: {BOXES.get(thing, 'none')}."


def ask_again(state):
    """What the supervisor is asked before it speaks: the question again, once a tool has answered."""
    question, *rest = state["messages"]
    return question.text if rest else None


def call(state):
    """The tool call that the supervisor's first message stands for; the next one is its answer."""
    said = state["messages"][-1]
    if any(message.type == "tool" for message in state["messages"]):
        return END
    thing = next((word.strip(".:") for word in said.text.split() if word.strip(".:").endswith("s")), "nothing")
    return Send("tools", [{"name": "find", "args": {"thing": thing}, "id": said.id, "type": "tool_call"}])


graph = ChoreoGraph(system="Agents find things and say the box.")
graph.add_node("supervisor", Agent("Alice", prompt=ask_again, sampling=Sampling(max_tokens=12)))
graph.add_node("tools", ToolNode([find]))
graph.add_edge(START, "supervisor").add_edge("tools", "supervisor")
graph.add_conditional_edges("supervisor", call, ["tools", END])

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    for thing in ("kites", "bells", "hats"):
        state = app.invoke({"messages": [("user", f"Where are the {thing}?")]})
        for message in state["messages"]:
            print(f"{message.name or 'you':>10}: {message.text}")
    stats = engine.stats()
    print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused from the cache")
