"""Labels of who said what, and the promises that stand on them, on engines that several graphs share."""

from __future__ import annotations

from typing import Any

import pytest
from support.graphs import QUESTION, agent

from choreo_agents import START, ChoreoGraph, Engine, MessageHandle, Policy, Rule, Sampling, send
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


SECRET = "Ann has 3 red kites."
SAME = Sampling(forced=(40, 41, 42))
"""Whoever says it."""


def noted(policy: Policy | None = None, **systems: str) -> ChoreoGraph:
    """ann speaks, bob reads her, carl is there; each with a system prompt, if it is given one."""
    graph = ChoreoGraph(system="Root.", policy=policy)
    for name in ("ann", "bob", "carl"):
        graph.add_node(agent(name, system=systems.get(name)))
    graph.add_edge(START, "ann").add_edge("ann", "bob")
    return graph.add_edge("bob", "carl", visibility={})


def let_read(app: Any, source: str, reader: str) -> None:
    """Let a compiled graph's agent read what its declarations did not foresee: the guard is asked alone."""
    app.builder.nodes[reader].runnable._reader_rules.sources[source] = Rule()


def test_attack_another_graph_says_a_secret_under_a_name_of_this_one(engine: Engine) -> None:
    """Its bob is told what ann is told here: that makes nobody's secret of it only there."""
    other = noted(bob=SECRET).compile(engine=engine)
    app = noted(Policy(confidential={"ann.system": frozenset({"bob"})}), ann=SECRET, bob="Be quick.").compile(
        engine=engine
    )
    other.invoke(QUESTION)
    assert app.audit(app.invoke(QUESTION)).reached("bob", "encoding") == {"ann.system"}, "bob was not told it himself"
    let_read(app, "bob", "carl")
    with pytest.raises(VisibilityError, match=r"keeps 'ann.system' from 'carl'"):
        app.invoke(QUESTION)


def test_attack_another_graph_says_the_same_in_words_of_its_own(engine: Engine) -> None:
    """What another thread has re-encoded as just these words is not where this one's come from."""

    def graph(plan: Any) -> Any:
        made = ChoreoGraph(system="Root.")
        made.add_node(agent("plan", confidential=True, sampling=SAME)).add_node(agent("ann", sampling=SAME))
        made.add_node(agent("bob")).add_edge(START, "plan").add_edge("plan", "ann", visibility=plan)
        made.add_edge("ann", "bob", visibility=Rule("reencoded", scope="public"))
        return made.compile(engine=engine)

    mine, other = graph({}), graph("shared")
    state = mine.invoke(QUESTION)
    before = mine.audit(state)
    assert before.reached("bob", "words") == set()
    assert other.audit(other.invoke(QUESTION)).reached("bob", "words") == {"plan"}
    assert mine.audit(state) == before


def test_attack_personas_of_one_text_are_told_apart(engine: Engine) -> None:
    """What bob is told, too, is ann's secret all the same where ann has it from her own orders."""
    graph = noted(Policy(confidential={"ann.system": frozenset()}), ann=SECRET, carl=SECRET)
    graph = graph.with_rule("ann", "bob", "private").share("ann", "carl", "reencoded")
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    for report in (app.audit(), app.audit(state)):
        assert report.reached("carl", "words") == {"ann.system"} and report.reached("bob", "encoding") == set()
    free = noted(Policy(confidential={"ann.system": frozenset()}), ann=SECRET, bob=SECRET)
    free = free.with_rule("ann", "bob", "private").compile(engine=engine)
    let_read(free, "ann", "carl")
    with pytest.raises(VisibilityError, match=r"keeps 'ann.system' from 'carl'"):
        free.invoke(QUESTION)
    let_read(free, "bob", "carl")
    del free.builder.nodes["carl"].runnable._reader_rules.sources["ann"]
    assert free.audit(free.invoke(QUESTION)).reached("carl", "encoding") == {"bob.system"}, "his own orders are his"


def test_attack_equal_words_of_two_agents_stay_two_sources(engine: Engine) -> None:
    """ann's plan is no less a plan because bob says the same aloud; who reads bob alone has nothing of hers."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node("ann", agent("same", sampling=SAME, confidential=True)).add_node("bob", agent("same", sampling=SAME))
    for name, source in (("carl", "ann"), ("dan", "bob")):
        graph.add_node(agent(name)).add_edge(["ann", "bob"], name, visibility={source: "shared"})
        graph.add_node(agent(f"after {name}")).add_edge(name, f"after {name}")
    graph.add_edge(START, "ann").add_edge(START, "bob")
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    said = {entry["author"]: MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]}
    assert said["ann"] == said["bob"]
    for report in (app.audit(), app.audit(state)):
        assert [report.reached(name, "encoding") for name in ("carl", "after carl", "dan", "after dan")] == [
            {"ann"},
            {"ann"},
            set(),
            set(),
        ]


def test_attack_a_scope_inside_a_graph_is_seen_from_outside(engine: Engine) -> None:
    """Words that a subgraph encodes in ann's orders carry these: the graph around it has foreseen that."""
    inner = ChoreoGraph(system="Root.")
    inner.add_node(agent("ann", system=SECRET)).add_node(agent("bob"))
    inner.add_edge(START, "ann").add_edge("ann", "bob", visibility=Rule("reencoded", scope=["ann.system"]))
    outer = ChoreoGraph()
    outer.add_node("team", inner.compile(engine=engine)).add_edge(START, "team")
    app = outer.compile(engine=engine)
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert report.reached("team|bob", "encoding") == {"team|ann.system"}
    kept = outer.with_policy(Policy(confidential={"team|ann.system": frozenset()}))
    with pytest.raises(VisibilityError, match=r"keeps 'team\|ann.system' from 'team\|bob'"):
        kept.compile(engine=engine)
