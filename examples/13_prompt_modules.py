"""Agents that are told by modules of a schema: encoded once for all of them; the audit names the confidential one."""

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling, Schema

schema = Schema.from_text("""
<schema name="team">
  <system>Answer from the notes.</system>
  <module name="bags"><system>Notes: Ann has 7 green bags. Bob has 3 gold keys. Finn has 5 black hats.</system></module>
  <module name="plan" confidential="true"><system>Notes: Dan has 4 red maps.</system></module>
</schema>
""")

graph = ChoreoGraph()
sampling = Sampling(max_tokens=16)
graph.add_node("scout", Agent("scout", prompt=schema.prompt("<bags/><plan/>"), sampling=sampling))
graph.add_node("guide", Agent("guide", prompt=schema.prompt("<bags/>"), sampling=sampling))
graph.add_edge(START, "scout", visibility="reencoded").add_edge("scout", "guide")
graph.set_visibility(START, "guide", "reencoded")  # both read the question in the light of their notes

for finding in graph.audit().findings:
    print(f"{finding.context} can reach {finding.reader} by {finding.channel}: {finding.walk()}")

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    for question in ("What does Ann have?", "What does Dan have?"):
        before = engine.stats()
        state = app.invoke({"messages": [("user", question)]})
        after = engine.stats()
        print(f"{question} {after.tokens_encoded - before.tokens_encoded} tokens encoded")
        for message in state["messages"][1:]:
            print(f"  {message.name}: {message.text}")
