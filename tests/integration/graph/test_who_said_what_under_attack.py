"""Labels of who said what, and the promises that stand on them, on engines that several graphs share."""

from __future__ import annotations

from typing import Any

import pytest
from support.graphs import QUESTION, agent

from choreo_agents import START, ChoreoGraph, Engine, Policy, Rule, send
from choreo_agents.errors import VisibilityError


def planner(rule: Rule | str, policy: Policy | None = None) -> ChoreoGraph:
    """ann plans, and bob sees the plan by a rule."""
    graph = ChoreoGraph(system="Root.", policy=policy)
    graph.add_node(agent("ann", system="Ann has 3 red kites.", confidential=True)).add_node(agent("bob"))
    return graph.add_edge(START, "ann").add_edge("ann", "bob", visibility=rule)


@pytest.mark.parametrize("context", ["ann", "ann.system"])
@pytest.mark.parametrize("rule", ["shared", "reencoded"])
def test_attack_a_shared_encoding_carries_words_that_are_forbidden(engine: Engine, rule: str, context: str) -> None:
    """A policy on the words channel alone would let them out with the encoding that they are of."""
    policy = Policy(confidential={context: frozenset({"ann"})}, channels=frozenset({"words"}))
    assert policy.channels == {"words", "encoding"}
    with pytest.raises(VisibilityError, match=f"keeps '{context}' from 'bob'.*(Undeclare|remove the edge)"):
        planner(rule, policy).compile(engine=engine)
    planner("private", policy).compile(engine=engine)


def test_attack_a_send_hands_on_words_where_encodings_are_shared(engine: Engine) -> None:
    """What a run finds in the words channel, the graph has foreseen."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node(agent("ann", system="Ann has 3 red kites.", confidential=True)).add_node(agent("bob"))
    graph.add_edge(START, "ann").share("ann", "bob", "shared")

    def route(state: Any) -> list[Any]:
        return [send("bob", state, reencoded=[state["handles"][-1]])]

    graph.add_conditional_edges("ann", route, ["bob"], visibility={})
    app = graph.compile(engine=engine)
    foreseen, found = app.audit(), app.audit(app.invoke(QUESTION))
    assert found.reached("bob", "words") == {"ann", "ann.system"} == foreseen.reached("bob", "words")
    [hop] = next(each for each in foreseen.findings if (each.context, each.channel) == ("ann", "words")).path
    assert (hop.source, hop.reader, hop.by) == ("ann", "bob", "sent reencoded")
    assert {each.channel for each in foreseen.listed} == {"encoding"}, "who may attend to it may read it"
    assert planner("shared").audit().reached("bob", "words") == set(), "nobody sends"
