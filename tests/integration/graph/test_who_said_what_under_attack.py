"""Labels of who said what, and the promises that stand on them, on engines that several graphs share."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from support.graphs import QUESTION, agent

from choreo_agents import END, START, ChoreoGraph, Engine, MessageHandle, Policy, Sampling, VisibilityRule, Worker, send
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.influence import InfluenceTracker


def planner(rule: VisibilityRule | str, policy: Policy | None = None) -> ChoreoGraph:
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
    with pytest.raises(VisibilityError, match=f"keeps '{context}' from 'bob'.*(Remove the visibility|remove the edge)"):
        planner(rule, policy).compile(engine=engine)
    planner("private", policy).compile(engine=engine)


def test_attack_a_send_hands_on_words_where_encodings_are_shared(engine: Engine) -> None:
    """What a run finds in the words channel, the graph has foreseen."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node(agent("ann", system="Ann has 3 red kites.", confidential=True)).add_node(agent("bob"))
    graph.add_edge(START, "ann").set_visibility("ann", "bob", "shared")

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
SAME = Sampling(forced_token_ids=(40, 41, 42))
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
    app.builder.nodes[reader].runnable._reader_rules.sources[source] = VisibilityRule()


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
        made.add_edge("ann", "bob", visibility=VisibilityRule("reencoded", scope="public"))
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
    graph = graph.with_rule("ann", "bob", "private").set_visibility("ann", "carl", "reencoded")
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
    inner.add_edge(START, "ann").add_edge("ann", "bob", visibility=VisibilityRule("reencoded", scope=["ann.system"]))
    outer = ChoreoGraph()
    outer.add_node("team", inner.compile(engine=engine)).add_edge(START, "team")
    app = outer.compile(engine=engine)
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert report.reached("team|bob", "encoding") == {"team|ann.system"}
    kept = outer.with_policy(Policy(confidential={"team|ann.system": frozenset()}))
    with pytest.raises(VisibilityError, match=r"keeps 'team\|ann.system' from 'team\|bob'"):
        kept.compile(engine=engine)


def in_the_name_of_ann(state: Any, form: str) -> list[Any]:
    """What a function writes that has read bob's plan, and would have it pass for what ann says."""
    plan, said = state["messages"][-2], state["messages"][-1]
    words = f"Bob plans: {plan.text}"
    return [
        {
            "her metadata": AIMessage(words, response_metadata={"choreo": {"author": "ann", "persona": "ann"}}),
            "her signature": AIMessage(words, additional_kwargs={"choreo_source": "ann"}),
            "her message, edited": said.model_copy(update={"content": words}),
            "her message's id": AIMessage(words, id=said.id),
            "a person's words under her message's id": HumanMessage(words, id=said.id),
            "her persona": AIMessage(words, response_metadata={"choreo": {"author": "press", "persona": "ann"}}),
        }[form]
    ]


FORMS = ["her metadata", "her signature", "her message, edited", "her message's id", "her persona"]


@pytest.mark.parametrize("declared", [False, True], ids=["undeclared", "declared"])
@pytest.mark.parametrize("form", [*FORMS, "a person's words under her message's id"])
def test_attack_a_function_writes_in_an_agents_name(engine: Engine, form: str, declared: bool) -> None:
    """It is its own author: who reads ann, or is ann, reads nothing of it; unless it was declared to speak for her."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node(agent("bob", confidential=True)).add_node(agent("ann"))
    graph.add_node(
        "press", lambda state: {"messages": in_the_name_of_ann(state, form)}, persona="ann" if declared else None
    )
    graph.add_node("again", agent("again", persona="ann")).add_node(agent("carl"))
    graph.add_edge(START, "bob").add_edge("bob", "ann", visibility={}).add_edge("ann", "press")
    graph.add_edge("press", "again", visibility={}).add_edge("again", "carl", visibility={"ann": "shared"})
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    assert ("bob" in app.audit().reached("carl", "words")) == declared
    read = {
        entry["author"]: [
            engine.model.decode(list(made.tokens))
            for made in engine.inspect.descent([MessageHandle.model_validate(entry["handle"])]).values()
        ]
        for entry in state["handles"]
    }
    # One form names an author of another name, one says nothing of the persona.
    assert any("Bob plans" in text for text in read["carl"]) == (declared and form != "her persona")
    assert any("Bob plans" in text for text in read["again"]) == (declared and form != "her signature")


def test_attack_a_function_speaks_for_somebody_who_is_not_there(engine: Engine) -> None:
    graph = ChoreoGraph().add_node(agent("ann")).add_edge(START, "ann")
    graph.add_node("press", lambda state: None, persona="anne").add_edge("ann", "press")
    with pytest.raises(VisibilityError, match=r"'anne' of the function 'press' is not one of .*: ann"):
        graph.compile(engine=engine)
    with pytest.raises(InvalidRequestError, match="sets its persona itself"):
        graph.add_node(agent("bob"), persona="ann")


def test_attack_a_restart_leaves_no_instruction_out(make_engine: Any) -> None:
    """What a route asked each instance, and a function its agent, stands before their words again, each its own."""
    worker = Worker("worker", prompt="Do it.", sampling=SAME)
    graph = ChoreoGraph(system="Root.")
    graph.add_node(worker).add_node(agent("guide", prompt=lambda state: f"Of {len(state['messages'])} messages?"))
    graph.add_node("again", agent("worker", persona="worker"))
    graph.add_conditional_edges(
        START, lambda state: [worker.send(state, f"Write part {number}.") for number in (1, 2)], ["worker"]
    )
    graph.add_edge("worker", "guide").add_edge("guide", "again").add_conditional_edges(
        "again", lambda state: "guide" if len(state["handles"]) < 6 else END, ["guide", END]
    )
    saver, config = InMemorySaver(), {"configurable": {"thread_id": "1"}}
    graph.compile(saver, engine=make_engine(salt="s"), interrupt_before=["again"]).invoke(QUESTION, config)
    engine = make_engine(salt="s")
    app = graph.compile(saver, engine=engine)
    state = app.invoke(None, config)
    asked = {"again": ["Write part 1.", "Write part 2."], "guide": ["Of 3 messages?", "Of 5 messages?"]}
    for reader, instructions in asked.items():
        said = [entry["handle"] for entry in state["handles"] if entry["author"] == reader]
        made = engine.inspect.descent([MessageHandle.model_validate(said[-1])])
        view = [made[parent].tokens for parent in made[said[-1]["id"]].parents]
        texts = [engine.model.decode(list(tokens), special=False).strip() for tokens in view]
        assert [text for text in texts if text in instructions] == instructions
    assert "worker.system" not in app.audit(state).reached("worker", "encoding")
    assert "worker.system" in app.audit().reached("guide", "encoding")


def test_what_reached_a_message_is_found_by_every_way(engine: Engine) -> None:
    """Two ways lead to one secret, the longer one through the shorter: neither hides what the other holds."""
    graph = ChoreoGraph(system="Root.")
    names = ["ann", "bob", "carl", "dan"]
    for name in names:
        graph.add_node(agent(name, system=f"{name} has kites.", confidential=True))
    for number, name in enumerate(names):
        graph.add_edge(names[number - 1] if number else START, name, visibility={})
        for source in names[:number]:
            graph.set_visibility(source, name, "shared" if (number + names.index(source)) % 3 else "reencoded")
    app = graph.compile(engine=engine)
    static, state = app.audit(), app.invoke(QUESTION)
    found = {(each.context, each.reader, each.channel) for each in app.audit(state).findings}
    assert found == {(each.context, each.reader, each.channel) for each in static.findings}


@pytest.mark.parametrize(
    "rule",
    [
        VisibilityRule("reencoded"),
        VisibilityRule("reencoded", scope="public"),
        VisibilityRule("reencoded", scope=["ann"]),
    ],
    ids=["for its reader", "for all", "as a context"],
)
def test_attack_confidential_words_are_confidential_in_every_encoding(engine: Engine, rule: VisibilityRule) -> None:
    """Whoever encodes them again, and wherever: the copy is no less a private context than what it is of."""
    graph = planner(rule)
    graph.add_node(agent("carl")).add_edge(START, "carl").set_visibility("carl", "bob", rule)
    state = graph.compile(engine=engine).invoke(QUESTION)
    [said] = [MessageHandle.model_validate(each["handle"]) for each in state["handles"] if each["author"] == "bob"]
    [lineage] = engine.inspect.audit([said]).messages
    copies = [each for each in lineage.through("encoding") if each.authors == {"ann"}]
    assert copies and all(each.confidential for each in copies)
    assert not any(each.confidential for each in lineage.ancestors if each.authors != {"ann"})


def test_attack_words_that_go_around_lose_none_of_those_who_said_them(engine: Engine) -> None:
    """Whoever is asked about first: what is found on the way round is not all that reached those on it."""
    said = [40, 41, 42]
    told = {name: engine.prefill([50 + at], author=f"{name}.system") for at, name in enumerate(["ann", "bob", "carl"])}
    around = [engine.prefill(said, [told["ann"]])]
    for name in ("bob", "carl", "ann"):
        around.append(engine.prefill(said, [told[name]], source=around[-1]))
    assert around.pop() == around[0], "the last is the first again"
    around.append(engine.prefill(said, source=around[2]))
    entries = [
        {"handle": handle.model_dump(), "author": name, "persona": name, "superstep": at}
        for at, (handle, name) in enumerate(zip(around, ["ann", "bob", "carl", "dora"], strict=True))
    ]
    for first in permutations(entries):
        labels = InfluenceTracker([engine], Chart(()), entries)  # type: ignore[arg-type]
        for entry in first:
            reached = {name.removeprefix("|") for name, _ in labels.trace(entry) or ()}  # type: ignore[arg-type]
            assert reached >= {"ann", "bob", "carl", "ann.system", "bob.system", "carl.system"}
