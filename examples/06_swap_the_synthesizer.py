"""A stock LangGraph program whose nodes call a chat model; then one changed line: its merge reads their KV caches."""

import os
import time

from langchain_choreo import ChatChoreo
from langgraph.graph import END, START, MessagesState, StateGraph

from choreo_agents import Engine, Synthesizer

ASKED = {"Alice": "Report on Ann.", "Bruno": "Report on Bob.", "Clara": "Report on Cleo."}
FACT = r"(Ann|Bob|Cleo) has [2-9] (red|blue|green) (kites|boats|drums)\."
REPORT, ALL = {"regex": f"( {FACT}){{70}}"}, {"regex": f" {FACT}"}  # about 500 tokens, and a sentence
MERGE = "What do they have?"


def node(chat, asked):
    return lambda state: {"messages": [chat.invoke([*state["messages"], ("user", asked)])]}


def program(engine, swap):
    chat = ChatChoreo(engine=engine)
    graph = StateGraph(MessagesState)
    for name, asked in ASKED.items():
        graph.add_node(name, node(chat.bind(response_format=REPORT), asked)).add_edge(START, name)
    if swap:
        graph.add_node("David", Synthesizer("David", engine=engine, merges=[*ASKED], prompt=MERGE, response_format=ALL))
    else:
        graph.add_node("David", node(chat.bind(response_format=ALL), MERGE))
    return graph.add_edge(list(ASKED), "David").add_edge("David", END).compile()


def cost_of_merge(model, swap):
    """Tokens encoded from the last branch's end to the merge's first token, and the milliseconds of that."""
    asked = {"messages": [("user", "Ann, Bob and Cleo have things.")]}
    with Engine.load(model) as engine:
        ended = first = None
        for mode, part in program(engine, swap).stream(asked, stream_mode=["updates", "messages"]):
            now = engine.stats().tokens_encoded, time.perf_counter()
            if mode == "updates" and "David" not in part:
                ended = now
            elif mode == "messages" and part[1]["langgraph_node"] == "David":
                first = first or now
        return first[0] - ended[0], 1e3 * (first[1] - ended[1])


model = os.environ.get("CHOREO_MODEL", "embedded")
costs = {"text": cost_of_merge(model, swap=False), "caches": cost_of_merge(model, swap=True)}
for read, (encoded, first) in costs.items():
    print(f"merged from {read:>6}: {encoded:5} tokens encoded, first token after {first:7.1f} ms")
(text, slow), (caches, fast) = costs.values()
print(f"{text / caches:.1f}x fewer tokens, {slow / fast:.1f}x sooner")
