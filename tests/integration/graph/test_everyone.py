"""Graphs in which everyone sees everyone, and the note on whom an agent runs after and does not see."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import StateGraph
from langgraph.types import Command
from support.graphs import QUESTION, agent, speakers_of

from choreo_agents import END, START, ChoreoGraph, ChoreoState, Engine, Policy
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.compiling import unseen_pairs


def supervised(rounds: int = 2, **options: Any) -> ChoreoGraph:
    """A supervisor that speaks, a route that calls its workers in turn, and is behind each of them again."""
    graph = ChoreoGraph(**options)

    def route(state: Any) -> Command[Literal["ann", "bob", "__end__"]]:
        done = sum(message.type == "ai" for message in state["messages"])
        return Command(goto=["ann", "bob"][done // 2 % 2] if done < 2 * rounds else END)

    graph.add_node(agent("boss"))
    graph.add_node("route", route)
    graph.add_node(agent("ann"))
    graph.add_node(agent("bob"))
    graph.add_edge(START, "boss").add_edge("boss", "route", visibility={})
    graph.add_edge("ann", "boss", visibility={}).add_edge("bob", "boss", visibility={})
    return graph


def who_saw(engine: Engine, state: dict[str, Any], author: str) -> list[str | None]:
    return [source for source, _ in speakers_of(engine, state, author) if source != "public root"]


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_a_routed_graph_sees_all_that_was_said_in_the_order_in_which_it_was(engine: Engine, mode: Any) -> None:
    state = supervised(visibility=mode).compile(engine=engine).invoke(QUESTION)
    said = [entry["author"] for entry in state["handles"]]
    assert said == [START, "boss", "ann", "boss", "bob", "boss"]
    assert who_saw(engine, state, "bob") == said[:4]
    assert who_saw(engine, state, "ann") == said[:2]


def test_nobody_sees_the_supervisor_without_it(engine: Engine) -> None:
    state = supervised().compile(engine=engine).invoke(QUESTION)
    assert who_saw(engine, state, "bob") == [START]


def test_messages_of_one_superstep_stand_as_langgraph_applies_them(engine: Engine) -> None:
    graph = ChoreoGraph(visibility="shared")
    for name in ("zoe", "ann", "me"):
        graph.add_node(agent(name))
        graph.add_edge(START, name).add_edge(name, "judge")
    graph.add_node("judge", agent("judge"), defer=True)
    graph.add_edge("judge", "me again")
    graph.add_node("me again", agent("me again", persona="me"))
    state = graph.compile(engine=engine).invoke(QUESTION)
    messages = [message.name or START for message in state["messages"]]
    assert messages == [START, "ann", "me", "zoe", "judge", "me again"]
    assert who_saw(engine, state, "judge") == messages[:4] and who_saw(engine, state, "me again") == messages[:5]


def test_a_private_pair_is_the_exception(engine: Engine) -> None:
    graph = supervised(visibility="shared").set_visibility("ann", "bob", "private")
    with pytest.raises(VisibilityError, match="private"):
        graph.compile(engine=engine)  # boss hands on what ann said
    graph = supervised(visibility="reencoded").set_visibility("ann", "bob", "private")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert who_saw(engine, state, "bob") == [START, "boss", "boss"]


def test_what_is_said_confidentially_is_for_those_alone_to_whom_it_is_declared(engine: Engine) -> None:
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(agent("plan", confidential=True))
    graph.add_node(agent("ann"))
    graph.add_node(agent("bob"))
    graph.add_edge(START, "plan").add_edge("plan", "ann").add_edge("ann", "bob")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert who_saw(engine, state, "ann") == [START] and who_saw(engine, state, "bob") == [START, "ann"]
    assert not graph.audit().violations
    graph.set_visibility("plan", "ann")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert who_saw(engine, state, "ann") == [START, "plan"]
    reaches = [f for f in graph.audit().findings if f.context == "plan"]
    assert {f.reader for f in reaches} == {"ann", "bob"}


def test_a_rule_that_is_changed_for_a_pair_is_declared_for_it(engine: Engine) -> None:
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(agent("plan", confidential=True)).add_node(agent("ann"))
    graph.add_edge(START, "plan").add_edge("plan", "ann")
    state = graph.with_rule("plan", "ann", "shared").compile(engine=engine).invoke(QUESTION)
    assert who_saw(engine, state, "ann") == [START, "plan"]
    state = (
        graph.with_rule("plan", "ann", "shared")
        .with_rule("*", "ann", "private")
        .compile(engine=engine)
        .invoke(QUESTION)
    )
    assert who_saw(engine, state, "ann") == [START, "plan"]


def test_policies_hold_of_pairs_that_nobody_declared(engine: Engine) -> None:
    def made(on_violation: Any) -> ChoreoGraph:
        policy = Policy(confidential={"ann.system": ["ann"]}, on_violation=on_violation)
        graph = supervised(visibility="shared", policy=policy)
        return graph.with_system("ann", "Ann has a secret.")

    with pytest.raises(VisibilityError, match=r"ann\.system"):
        made("raise").compile(engine=engine)
    compiled = made("reencode").compile(engine=engine)
    assert ("ann", "boss") in {(hop.source, hop.reader) for hop in compiled.audit().changed}
    assert not compiled.audit().violations
    compiled.invoke(QUESTION)


def test_an_agent_of_a_stock_graph_reads_everyone(engine: Engine) -> None:
    graph = StateGraph(ChoreoState)
    graph.add_node("ann", agent("ann", engine=engine))
    graph.add_node("plan", agent("plan", engine=engine, confidential=True))
    graph.add_node("bob", agent("bob", engine=engine, reads={"*": "shared", "eve": "private"}))
    graph.add_node("eve", agent("eve", engine=engine))
    graph.add_edge(START, "ann").add_edge("ann", "plan").add_edge("plan", "eve").add_edge("eve", "bob")
    state: Any = graph.compile().invoke(QUESTION)  # type: ignore[call-overload]
    assert who_saw(engine, state, "bob") == [START, "ann"] and who_saw(engine, state, "eve") == [START]


@pytest.mark.parametrize("hidden", ["pro", "*"])
def test_a_private_everyone_of_a_stock_graph_is_kept_out_through_whomever(engine: Engine, hidden: str) -> None:
    def made(mode: Any) -> Any:
        graph = StateGraph(ChoreoState)
        graph.add_node("pro", agent("pro", engine=engine))
        graph.add_node("con", agent("con", engine=engine, reads={"pro": "shared"}))
        graph.add_node("first", agent("first", engine=engine, persona="judge", reads={"con": mode}))
        graph.add_node("last", agent("last", engine=engine, persona="judge", reads={hidden: "private", "con": mode}))
        graph.add_edge(START, "pro").add_edge("pro", "con").add_edge("con", "first").add_edge("first", "last")
        return graph.compile()

    with pytest.raises(VisibilityError, match="'pro' is declared private to 'last'"):
        made("shared").invoke(QUESTION)
    state = made("reencoded").invoke(QUESTION)
    assert who_saw(engine, state, "last") == [START, "con", "first"]


@pytest.mark.parametrize(("name", "inside"), [(None, False), ("brief", False), (None, True)])
def test_a_subgraphs_agent_is_told_what_was_said_outside_by_a_function(
    engine: Engine, name: str | None, inside: bool
) -> None:
    """As the function's words or, with an id, as a person's; and by one of its own graph."""

    def brief(state: Any) -> dict[str, Any]:
        return {"messages": [HumanMessage(f"Boss said: {state['messages'][1].text}", id=name)]}

    inner, graph = ChoreoGraph(visibility="shared"), ChoreoGraph(visibility="shared")
    graph.add_node(agent("boss")).add_edge(START, "boss")
    home, before = (inner, START) if inside else (graph, "boss")
    home.add_node("brief", brief).add_edge(before, "brief")
    inner.add_node(agent("ann")).add_edge("brief" if inside else START, "ann")
    graph.add_node("team", inner.compile(engine=engine)).add_edge("boss" if inside else "brief", "team")
    state = graph.compile(engine=engine).invoke(QUESTION)
    heard = "team|brief" if inside else START if name else "brief"
    assert who_saw(engine, state, "team|ann") == [START, "boss", heard]


def test_a_drawing_has_what_holds_of_each_edge_and_declared_pairs_alone(engine: Engine) -> None:
    graph = supervised(visibility="reencoded").set_visibility("ann", "bob", "private")
    drawn = {(e.source, e.target): e.data for e in graph.compile(engine=engine).get_graph().edges}
    assert drawn["ann", "boss"] == "reencoded" and drawn["ann", "bob"] == "private"
    assert ("boss", "ann") not in drawn
    plan = ChoreoGraph(visibility="shared").add_node(agent("plan", confidential=True)).add_node(agent("ann"))
    plan.add_node("count", lambda state: {}).add_edge(START, "plan").add_edge("plan", "ann").add_edge("ann", "count")
    app = plan.compile(engine=engine)
    labels = {(e.source, e.target): e.data for e in app.get_graph().edges}
    assert labels["plan", "ann"] is labels["ann", "count"] is None, "it is not for ann, and no agent reads"
    for drawing in (plan.draw(), app.draw()):
        assert "shared" not in drawing and 'n_plan["plan"]' in drawing and "n_plan:::private" in drawing
        assert "n_plan[[" not in drawing
    shown = app._repr_mimebundle_()
    assert shown["text/markdown"] == plan._repr_markdown_() and "image/png" not in shown
    assert (repr(plan), repr(app)) == ("ChoreoGraph(plan, ann, count)", "CompiledChoreoGraph(plan, ann, count)")
    assert repr(agent("ann")) == "Agent('ann')"


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("compiling")]


def test_the_note_names_pairs_and_what_would_change_them(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    graph = supervised().add_node(agent("dora")).add_edge("ann", "dora").set_visibility("boss", "ann", "private")
    graph.compile(engine=engine)
    [note] = notes(caplog)
    lines = note.splitlines()
    assert "'bob' may run after 'boss' but does not see it: graph.set_visibility('boss', 'bob')" in lines
    assert not any("'ann' may run after 'boss'" in line for line in lines)
    assert not any("'boss' may run after 'ann'" in line for line in lines), "its edge says visibility={}"
    assert "visibility=" in lines[-1]
    caplog.clear()
    graph.compile(engine=engine)
    assert not notes(caplog), "a graph of this shape was noted"
    supervised(visibility="shared").compile(engine=engine)
    assert not notes(caplog)


def test_a_long_note_tells_ten_pairs_and_how_many_more(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    graph = ChoreoGraph()
    names = [f"long {name}" for name in "abcdef"]
    for name in names:
        graph.add_node(agent(name))
    for one, other in zip((START, *names), names, strict=False):
        graph.add_edge(one, other)
    graph.compile(engine=engine)
    [note] = notes(caplog)
    assert note.count("may run after") == 10 and "1 more" not in note
    graph.add_node(agent("long g")).add_edge("long f", "long g")
    caplog.clear()
    graph.compile(engine=engine)
    [note] = notes(caplog)
    assert note.count("may run after") == 10 and "and 5 more pairs" in note


def test_a_note_advises_nothing_that_breaks_a_promise(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Not to share what is confidential, what a policy keeps, or what attends to something that is private."""
    graph = ChoreoGraph(policy=Policy(confidential={"ann.system": frozenset({"bob"})}))
    graph.add_node(agent("plan", confidential=True)).add_node(agent("ann", system="Secret.")).add_node(agent("bob"))
    graph.add_node(agent("carl")).add_node(agent("dora")).add_edge(START, "plan").add_edge("plan", "ann", visibility={})
    graph.add_edge("ann", "bob").add_edge("bob", "carl", visibility="reencoded").add_edge("carl", "dora")
    graph.set_visibility("ann", "dora", "private").set_visibility("plan", "bob", "private")
    graph.compile(engine=engine)
    assert not notes(caplog)


@pytest.mark.parametrize("kept", ["by a policy", "private"])
def test_a_note_advises_nothing_that_breaks_a_promise_to_who_reads_its_reader(
    engine: Engine, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    policy = Policy(confidential={"ann.system": frozenset({"bob", "cleo"})} if kept == "by a policy" else {})
    graph = ChoreoGraph(policy=policy).add_node(agent("ann", system="Secret."))
    graph.add_node(agent("bob")).add_node(agent("cleo")).add_node(agent("dora")).add_edge(START, "ann")
    graph.add_edge("ann", "bob").add_edge("bob", "cleo", visibility={}).add_edge("cleo", "dora")
    if kept == "private":
        graph.set_visibility("ann", "dora", "private").set_visibility("bob", "dora", "private")
    assert ("ann", "cleo") in unseen_pairs(graph, graph.chart())
    graph.compile(engine=engine)
    assert not notes(caplog)


def test_only_who_may_run_after_is_noted() -> None:
    graph = ChoreoGraph()
    graph.add_node("relay", lambda state: {})
    for name in ("one", "two", "join", "lone"):
        graph.add_node(agent(name))
    graph.add_edge(START, "one").add_edge(START, "two").add_edge("two", "relay").add_edge(["one", "relay"], "join")
    graph.add_edge(START, "lone").add_conditional_edges("lone", lambda state: "end", {"end": END})
    assert list(unseen_pairs(graph, graph.chart())) == [("two", "join")]
    other = graph.with_policy(Policy())
    other.add_conditional_edges("two", lambda state: "lone")
    assert ("two", "lone") in unseen_pairs(other, other.chart())
    graph.add_conditional_edges("two", lambda state: "lone", visibility={})
    assert not list(unseen_pairs(graph, graph.chart())), "it says so of whomever it leads to"
