"""A supervisor with tools: the loop, `tool` and `ToolNode` are LangGraph's own; only the messages are choreographed.

The embedded model is far too small to write tool calls. Asked where a thing is, it names the thing, and perhaps a box
that it made up. A plain node takes that for a call, and when the tool has answered, the supervisor is asked again.
"""

from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode, tools_condition

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


def parse(state):
    """The supervisor's first message with the tool call that it stands for; the next one is its answer."""
    said = state["messages"][-1]
    if any(message.type == "tool" for message in state["messages"]):
        return {}
    thing = next((word.strip(".:") for word in said.text.split() if word.strip(".:").endswith("s")), "nothing")
    call = {"name": "find", "args": {"thing": thing}, "id": said.id}
    return {"messages": [said.model_copy(update={"tool_calls": [call]})]}  # the same words: their KV stays good


graph = ChoreoGraph(system="Agents find things and say the box.")
graph.add_node("supervisor", Agent("Alice", prompt=ask_again, sampling=Sampling(max_tokens=12)))
graph.add_node("parse", parse)
graph.add_node("tools", ToolNode([find]))
graph.add_edge(START, "supervisor").add_edge("supervisor", "parse").add_edge("tools", "supervisor")
graph.add_conditional_edges("parse", tools_condition, ["tools", END])

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    for thing in ("kites", "bells", "hats"):
        state = app.invoke({"messages": [("user", f"Where are the {thing}?")]})
        for message in state["messages"]:
            calls = "".join(f"   -> {each['name']}({each['args']})" for each in getattr(message, "tool_calls", []))
            print(f"{message.name or 'you':>10}: {message.text}{calls}")
    stats = engine.stats()
    print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused from the cache")
