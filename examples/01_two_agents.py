"""Two agents: a scout who has notes, and a captain who reads the scout's KV cache instead of its words."""

from choreo_agents import END, START, Agent, ChoreoGraph, Engine

graph = ChoreoGraph(system="Agents read their notes, hear each other and agree on one answer.")
graph.add_node(Agent("scout", system="Notes: Ann has 3 red kites. Bob has 5 blue boats. Cleo has 2 green drums."))
graph.add_node(Agent("captain"))
graph.add_edge(START, "scout")  # it reads the question behind its notes
graph.add_edge("scout", "captain", visibility="shared")  # make it "private", and it does not know
graph.add_edge("captain", END)

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    state = app.invoke({"messages": [("user", "What does Bob have?")]})

    for message in state["messages"]:
        print(f"{message.name or 'you':>8}: {message.text}")
    stats = engine.stats()
    print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused from the cache")
    print(app.get_graph().draw_mermaid())
