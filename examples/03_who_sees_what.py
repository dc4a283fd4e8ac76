"""Who can learn what a negotiator keeps to herself: asked before the run, refused by a policy, and seen in the run."""

from choreo_agents import START, Agent, ChoreoGraph, Engine, Policy
from choreo_agents.errors import VisibilityError

graph = ChoreoGraph(system="Two agents trade.")
graph.add_node("ann.plan", Agent("Ann", system="Notes: Ann has 3 red kites.", persona="ann", confidential=True))
graph.add_node("ann", Agent("Ann", system="Notes: Ann has 3 red kites.", persona="ann"))
graph.add_node("bob", Agent("Bob", system="Notes: Bob has 5 blue boats."))
graph.add_edge(START, "ann.plan").add_edge("ann.plan", "ann").add_edge("ann", "bob")

for finding in graph.audit().findings:
    print(f"before: {finding.context} can reach {finding.reader} by {finding.channel}: {finding.walk()}")

keep = Policy(confidential={"ann.plan": {"ann"}, "ann.system": {"ann"}})
with Engine.load("embedded") as engine:
    try:
        graph.with_policy(keep).compile(engine=engine)
    except VisibilityError as error:
        print(f"refused: {error}")

    safe = graph.with_rule("ann", "bob", "reencoded").with_policy(keep)
    app = safe.compile(engine=engine)
    state = app.invoke({"messages": [("user", "What does Ann have?")]})
    for finding in app.audit(state).findings:
        print(f"after: {finding.context} reached {finding.reader} by {finding.channel}")
