"""Map-reduce over documents: each worker reads one of them and says what matters; one agent answers.

What the workers found is merged as they encoded it. The documents themselves are in no other view.
"""

from langchain_core.messages import AIMessage

from choreo_agents import END, START, ChoreoGraph, Engine, Sampling, Synthesizer, Worker

DOCUMENTS = {  # three search logs, by whose they are
    "Alice": "Find kites: 12. Find boats: none. Find drums: 7. Find rings: none.",
    "Bruno": "Find lamps: none. Find bells: 31. Find masks: 5.",
    "Clara": "Find cups: 9. Find hats: none. Find maps: 22. Find keys: 14.",
}


def map_documents(state):
    """One `Send` for each document, which joins what that worker alone sees; all run as one batch."""
    for name, text in DOCUMENTS.items():
        seen = {**state, "messages": [*state["messages"], AIMessage(text, name=name)]}
        yield reader.send(seen, "Say what you found.", speaker=name)


reader = Worker("reader", sampling=Sampling(max_tokens=48))
graph = ChoreoGraph(system="Agents find things and say the box.")
graph.add_node(reader)
graph.add_node(Synthesizer("David", merges=["reader"], strategy="sequential", prompt="Where are the bells?"))
graph.add_conditional_edges(START, lambda state: list(map_documents(state)), ["reader"])
graph.add_edge("reader", "David").add_edge("David", END)

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    for update in app.stream({"messages": [("user", "Find all things.")]}, stream_mode="updates"):
        for node, said in update.items():
            for message in said["messages"]:
                print(f"{node}: {message.text}")
    stats = engine.stats()
    print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused")
