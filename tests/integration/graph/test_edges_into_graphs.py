"""What an edge gives to a graph its agents see, as far as they see their graph's input; what leaves it likewise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    MessageHandle,
    Policy,
    VisibilityRule,
    send,
)
from choreo_agents import VisibilityMode as Mode
from choreo_agents.errors import VisibilityError
from choreo_agents.testing import Script

QUESTION: Any = {"messages": [("user", "Where is it 0 says?")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}
KINDS = ("ours", "stock")


class Written(MessagesState, total=False):
    plan: str


class Planned(ChoreoState, total=False):
    plan: str


class Plan(TypedDict):
    plan: str


@pytest.fixture
def script() -> Script:
    numbers = count(1)
    return Script(default=lambda call: f"{(call.agent or '').rpartition('|')[2]} {next(numbers)} says.")


@pytest.fixture
def engine(script: Script) -> Iterator[Engine]:
    with script.load() as engine:
        yield engine
        engine.check()


def line(made: Any, nodes: dict[str, Any]) -> Any:
    before = START
    for name, node in nodes.items():
        made.add_node(name, node)
        made.add_edge(before, name)
        before = name
    return made.add_edge(before, END)


def words(text: str) -> list[str]:
    return re.findall(r"\w+ \d+ says", text)


def team(kind: str, engine: Engine, *nodes: tuple[str, Any], start: Any = None, **options: Any) -> Any:
    """A graph of agents that see each other, and what comes into it as `start` says."""
    made: Any = ChoreoGraph(visibility="shared", **options) if kind == "ours" else StateGraph(ChoreoState, **options)
    reads: Any = {"*": "shared"} if start is None else {"*": "shared", START: start}
    return line(made, {name: node or Agent(name, engine=engine, reads=reads) for name, node in nodes})


def planned(inner: Any, visibility: Any = "shared", *, policy: Policy | None = None) -> ChoreoGraph:
    graph = ChoreoGraph(policy=policy).add_node(Agent("planner", system="There are 12 kites.")).add_node("team", inner)
    return graph.add_edge(START, "planner").add_edge("planner", "team", visibility=visibility)


def seen(script: Script, agent: str) -> list[str | None]:
    found = next(call for call in reversed(script.calls) if call.agent == agent).messages
    return [message.author for message in found if message.author != "public root"]


def attends(engine: Engine, entry: Any, other: Any) -> bool:
    handle = MessageHandle.model_validate(entry["handle"])
    return other["handle"]["id"] in {each.id for each in engine.inspect.ancestors(handle)}


@pytest.mark.parametrize("keeps", [None, True])
@pytest.mark.parametrize("around", [(), ("ours",), ("stock",), ("ours", "stock")])
@pytest.mark.parametrize("kind", KINDS)
def test_everyone_reads_what_the_stock_program_sends(
    script: Script, engine: Engine, kind: str, around: tuple[str, ...], keeps: Any
) -> None:
    """A planner, a team in a graph, or in graphs in that, and a reporter; two turns of a thread. In a graph of
    LangGraph's own nobody declares what a graph beside an agent sees of it: it stands there alone."""
    sent: list[list[str]] = []
    numbers = count(1)

    def node(name: str) -> Any:
        def speak(state: Any) -> Any:
            sent.append(words(" ".join(message.text for message in state["messages"])))
            return {"messages": [AIMessage(f"{name} {next(numbers)} says.")]}

        return speak

    stock = line(StateGraph(MessagesState), {"lead": node("lead"), "scout": node("scout")})
    ours = team(kind, engine, ("lead", None), ("scout", None))
    for outer in around:
        boss = {"boss": node("boss")} if outer == "ours" else {}
        stock = line(StateGraph(MessagesState), {**boss, "squad": stock.compile(checkpointer=keeps)})
        ours = team(outer, engine, *((name, None) for name in boss), ("squad", ours.compile(checkpointer=keeps)))
    ends = {"planner": node("planner"), "team": stock.compile(checkpointer=keeps), "reporter": node("reporter")}
    app = line(StateGraph(MessagesState), ends).compile(InMemorySaver())
    agents = {"planner": Agent("planner"), "team": ours.compile(checkpointer=keeps), "reporter": Agent("reporter")}
    choreo = line(ChoreoGraph(visibility="shared"), agents).compile(InMemorySaver(), engine=engine)
    for _ in range(2):
        app.invoke(QUESTION, THREAD)
        choreo.invoke(QUESTION, THREAD)
    assert [words(call.text) for call in script.calls] == sent


@pytest.mark.parametrize("schema", [ChoreoState, MessagesState])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("edge", "start", "sees", "again"),
    [
        ("shared", None, True, False),
        ("reencoded", None, True, True),
        ("shared", "reencoded", True, True),
        (Mode("loud", "words", transform=str.upper), "reencoded", True, True),
        ("private", None, False, False),
        ({}, None, False, False),
        ("shared", "private", False, False),
        (Mode("out of sight", "nothing"), None, False, False),
    ],
)
def test_an_edge_gives_no_more_than_the_agent_has_of_input(
    script: Script, engine: Engine, kind: str, schema: Any, edge: Any, start: Any, sees: bool, again: bool
) -> None:
    """Whether or not the graph's input has a channel for encodings."""
    inner = team(kind, engine, ("scout", None), start=start, input_schema=schema).compile()
    app = planned(inner, edge).compile(engine=engine)
    state = app.invoke(QUESTION)
    assert ("planner" in seen(script, "team|scout")) == sees
    assert (START in seen(script, "team|scout")) == (start != "private")
    plan, found = [entry for entry in state["handles"] if entry["author"] != START]
    assert attends(engine, found, plan) == (sees and not again)
    assert ("planner.system" in app.audit(state).reached("team|scout", "encoding")) == (sees and not again)
    assert ("PLANNER" in script.calls[-1].text) == (isinstance(edge, Mode) and sees)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_of_what_an_edge_gives_is_all_that_is_seen(script: Script, engine: Engine, kind: str) -> None:
    inner = team(kind, engine, ("scout", None)).compile()
    app = planned(inner, VisibilityRule("shared", history="last")).compile(InMemorySaver(), engine=engine)
    for _ in range(2):
        app.invoke(QUESTION, THREAD)
    assert seen(script, "team|scout").count("planner") == 1
    assert seen(script, "team|scout").count("team|scout") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_attack_input_that_is_kept_from_a_graph_is_kept_from_its_agents(
    script: Script, engine: Engine, kind: str
) -> None:
    graph = ChoreoGraph().add_node("team", team(kind, engine, ("scout", None)).compile())
    graph.add_edge(START, "team", visibility="private").compile(engine=engine).invoke(QUESTION)
    assert seen(script, "team|scout") == []


@pytest.mark.parametrize("taken", ["handles", "messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_attack_a_graph_that_takes_words_alone_shows_nothing_that_is_private_to_it(
    script: Script, engine: Engine, kind: str, taken: str
) -> None:
    options = {"input_schema": MessagesState} if taken == "messages" else {}
    inner = team(kind, engine, ("scout", None), **options).compile()
    note = lambda _: {"messages": [AIMessage("note 9 says")]}  # noqa: E731
    graph = planned(inner, "private").add_node("noter", note).add_edge(START, "noter")
    graph.add_edge("noter", "team", visibility="private").compile(engine=engine).invoke(QUESTION)
    assert seen(script, "team|scout") == [START]


@pytest.mark.parametrize("kind", KINDS)
def test_attack_a_namesake_outside_is_not_the_node_inside(script: Script, engine: Engine, kind: str) -> None:
    """Of which an agent declares another rule."""
    reader = Agent("reader", engine=engine, reads={"scout": "private"})
    inner = team(kind, engine, ("scout", None), ("reader", reader)).compile()
    for edge, sees in (("shared", ["scout"]), ("private", [])):
        graph = ChoreoGraph().add_node(Agent("scout")).add_node("team", inner)
        graph.add_edge(START, "scout").add_edge("scout", "team", visibility=edge).compile(engine=engine).invoke(
            QUESTION
        )
        assert seen(script, "team|reader") == [START, *sees]


@pytest.mark.parametrize("kind", KINDS)
def test_confidential_words_come_in_where_they_are_declared_to(script: Script, engine: Engine, kind: str) -> None:
    for declared in (False, True):
        graph = ChoreoGraph(visibility="shared").add_node(Agent("planner", confidential=True))
        graph.add_node("team", team(kind, engine, ("scout", None)).compile()).add_edge(START, "planner")
        graph.add_edge("planner", "team", **({"visibility": "shared"} if declared else {}))
        graph.compile(engine=engine).invoke(QUESTION)
        assert ("planner" in seen(script, "team|scout")) == declared


def criticised(kind: str, engine: Engine, on_violation: Any, critic: Any = "shared") -> ChoreoGraph:
    """A critic that is private to a team, which sees a planner that sees the critic."""
    graph = planned(team(kind, engine, ("scout", None)).compile(), policy=Policy(on_violation=on_violation))
    graph.add_node(Agent("critic")).add_edge(START, "critic").add_edge("critic", "planner", visibility=critic)
    return graph.set_visibility("critic", "team", "private")


@pytest.mark.parametrize("around", [None, "raise", "warn", "reencode"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_private_to_a_graph_reaches_its_agents_through_nobody(engine: Engine, kind: str, around: Any) -> None:
    """What a policy has mended is so in a graph around, whatever that one's says."""
    with pytest.raises(VisibilityError, match="Set the visibility of 'planner' to 'team' to 'reencoded'"):
        criticised(kind, engine, "raise").compile(engine=engine)
    app, home = criticised(kind, engine, "reencode").compile(engine=engine), ""
    if around is not None:
        outer = ChoreoGraph(policy=Policy(on_violation=around)).add_node("mid", app)
        app, home = outer.add_edge(START, "mid").compile(engine=engine), "mid|"
    state = app.invoke(QUESTION)
    last = {entry["author"].removeprefix(home): entry for entry in state["handles"]}
    assert attends(engine, last["planner"], last["critic"])
    assert not attends(engine, last["team|scout"], last["critic"])


@pytest.mark.parametrize("around", [None, "warn"])
@pytest.mark.parametrize("kind", KINDS)
def test_attack_a_thread_brings_into_a_graph_what_its_edges_do_not(engine: Engine, kind: str, around: Any) -> None:
    """The planner saw the critic by the edges of an earlier version. No chart knows: the run itself is stopped, by the
    policy of the graph that promises."""
    saver = InMemorySaver()

    def run(critic: Any, share: Any) -> None:
        graph = criticised(kind, engine, "raise", critic)
        graph = graph if share == "private" else graph.with_rule("critic", "team", share)
        app = graph.compile(None if around else saver, engine=engine)
        if around:
            outer = ChoreoGraph(policy=Policy(on_violation=around)).add_node("mid", app).add_edge(START, "mid")
            app = outer.compile(saver, engine=engine)
        app.invoke(QUESTION, THREAD)

    run("shared", "reencoded")
    with pytest.raises(VisibilityError, match=r"'(mid\|)?planner' shares attended to it"):
        run({}, "private")


@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_says_what_comes_into_a_graph(engine: Engine, kind: str) -> None:
    app = planned(team(kind, engine, ("scout", None)).compile()).compile(engine=engine)
    assert app.audit().reached("team|scout", "encoding") == {"planner.system"}
    assert app.audit(app.invoke(QUESTION)).reached("team|scout", "encoding") == {"planner.system"}


def test_a_graph_that_a_function_calls_is_given_nothing(script: Script, engine: Engine) -> None:
    inner = team("ours", engine, ("scout", None)).compile()
    graph = (
        ChoreoGraph(visibility="shared")
        .add_node(Agent("planner"))
        .add_node("team", lambda state: inner.invoke(state, {}))
    )
    line = graph.add_edge(START, "planner").add_edge("planner", "team")
    line.compile(engine=engine).invoke(QUESTION)
    assert seen(script, "team|scout") == [START]


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_a_graph_in_words_alone_is_refused_by_name_in_a_graph_of_langgraphs(
    engine: Engine, kind: str
) -> None:
    squad = team(kind, engine, ("scout", None), output_schema=MessagesState).compile()
    with pytest.raises(VisibilityError, match=r"'team\|squad' leave it as text only"):
        planned(team("stock", engine, ("squad", squad)).compile()).compile(engine=engine)


@pytest.mark.parametrize(
    ("edge", "options", "what"),
    [
        (
            "shared",
            {"input_schema": Plan, "state_schema": Planned},
            r"'planner' to 'team'.*Plan, the input.*'messages'",
        ),
        ("shared", {"output_schema": Plan, "state_schema": Planned}, r"'team' to 'writer'.*Plan, the output"),
        ("reencoded", {"input_schema": Written, "state_schema": Planned}, None),
        (VisibilityRule("reencoded", scope=("planner.system",)), {}, "'planner'.*'team|scout'.*planner.system"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_come_into_a_graph_or_out_of_it_is_refused_by_name(
    engine: Engine, kind: str, edge: Any, options: dict[str, Any], what: str | None
) -> None:
    options = dict(options)
    schema = options.pop("state_schema", ChoreoState)
    made: Any = ChoreoGraph(schema, **options) if kind == "ours" else StateGraph(schema, **options)
    inner = line(made, {"scout": Agent("scout", engine=engine)}).compile()
    graph = ChoreoGraph(Planned).add_node(Agent("planner", system="Plan.")).add_node("team", inner)
    graph.add_edge(START, "planner").add_edge("planner", "team", visibility=edge)
    graph.add_node(Agent("writer")).add_edge("team", "writer", visibility="reencoded")
    if what is None:
        graph.compile(engine=engine).invoke(QUESTION)
        return
    with pytest.raises(VisibilityError, match=what):
        graph.compile(engine=engine)


@pytest.mark.parametrize("how", ["sequence", "fallback"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_of_two_graphs_of_agents_is_refused_by_name(engine: Engine, kind: str, how: str) -> None:
    one, two = (team(kind, engine, (name, None)).compile() for name in ("scout", "lead"))
    with pytest.raises(VisibilityError, match="'team' has 2 graphs"):
        planned(one | two if how == "sequence" else one.with_fallbacks([two])).compile(engine=engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_send_to_a_graph_chooses_no_mode(script: Script, engine: Engine, kind: str) -> None:
    """Of several agents in there, each would have another rule to narrow: which messages come in is chosen, how is
    declared."""
    for mode in ("shared", "reencoded"):
        graph = planned(team(kind, engine, ("scout", None)).compile()).add_node("route", lambda _: None)
        graph.add_edge(START, "route").add_conditional_edges(
            "route", lambda state, mode=mode: [send("team", state, **{mode: state["handles"][-1:]})], ["team"]
        )
        graph.add_edge("planner", "route", visibility={})
        app = graph.compile(engine=engine)
        if mode == "shared":
            app.invoke(QUESTION)
            assert seen(script, "team|scout") == ["planner"]
        else:
            with pytest.raises(VisibilityError, match="'team' as 'reencoded', but it is a graph"):
                app.invoke(QUESTION)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("schema", [ChoreoState, MessagesState])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("edge", "sees", "again"),
    [
        ("shared", True, False),
        ("reencoded", True, True),
        (Mode("loud", "words", transform=str.upper), True, True),
        ("private", False, False),
        ({}, False, False),
        (Mode("out of sight", "nothing"), False, False),
    ],
)
def test_attack_what_leaves_a_graph_is_its_own_and_seen_as_declared(
    script: Script, engine: Engine, kind: str, schema: Any, deep: bool, edge: Any, sees: bool, again: bool
) -> None:
    """Whether or not the graph's output has a channel for encodings."""
    scout = Agent("scout", engine=engine, system="There are 12 kites.")
    inner = team(kind, engine, ("scout", scout), output_schema=schema).compile()
    if deep:
        inner = team("ours", engine, ("team", inner)).compile()
    graph = ChoreoGraph().add_node("team", inner).add_node(Agent("writer")).add_edge(START, "team")
    app = graph.add_edge("team", "writer", visibility=edge).compile(engine=engine)
    state, said = app.invoke(QUESTION), "team|team|scout" if deep else "team|scout"
    assert seen(script, "writer") == [START, *([said] if sees else [])]
    assert ("SCOUT" in script.calls[-1].text) == (isinstance(edge, Mode) and sees)
    for report in (app.audit(), app.audit(state)):
        assert report.reached("writer", "encoding") == ({f"{said}.system"} if sees and not again else set())
        assert report.reached("writer", "words") == ({f"{said}.system"} if again else set())


def test_input_is_encoded_in_a_private_context_of_the_graph_itself(script: Script, engine: Engine) -> None:
    inner = ChoreoGraph().add_node(Agent("lead", system="Be good.")).add_node(Agent("scout")).add_edge(START, "lead")
    inner.set_visibility(START, "scout", VisibilityRule("reencoded", scope=("lead.system",))).add_edge(
        "lead", "scout", visibility={}
    )
    app = planned(inner.compile(engine=engine)).compile(engine=engine)
    state = app.invoke(QUESTION)
    assert seen(script, "team|scout") == [START, "planner"]
    assert app.audit(state).reached("team|scout", "encoding") == {"team|lead.system"}


@pytest.mark.parametrize("kind", KINDS)
def test_two_modes_that_re_word_are_refused_by_name(engine: Engine, kind: str) -> None:
    loud, low = Mode("loud", "words", transform=str.upper), Mode("low", "words", transform=str.lower)
    inner = team(kind, engine, ("scout", None), start=loud).compile()
    with pytest.raises(VisibilityError, match=r"'planner'.*'team\|scout'.*'low'.*'loud'"):
        planned(inner, low).compile(engine=engine)


@pytest.mark.parametrize("taken", [ChoreoState, MessagesState])
@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_inside_a_graph_sees_no_more_than_it_was_sent(
    script: Script, engine: Engine, kind: str, taken: Any
) -> None:
    """Also of what the graph itself was given."""
    inner: Any = team(kind, engine, ("lead", None), input_schema=taken)
    inner.add_node("scout", Agent("scout", engine=engine))
    inner.add_conditional_edges("lead", lambda _: [Send("scout", {"task": "Look."})], ["scout"])
    planned(inner.compile()).compile(engine=engine).invoke(QUESTION)
    assert not seen(script, "team|scout")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_graph_read_as_words_stays_what_its_author_said(script: Script, engine: Engine, kind: str) -> None:
    """The graph inside takes messages alone, and gives out handles of all that it has read."""
    inner = team("ours", engine, ("bea", None), input_schema=MessagesState).compile(engine=engine)
    graph = team(kind, engine, ("ann", None), ("team", inner), ("cleo", None))
    app = graph.compile(InMemorySaver(), **({"engine": engine} if kind == "ours" else {}))
    state = app.invoke(QUESTION, THREAD)
    assert "ann 1 says" in str([message.text for message in script.calls[1].messages])
    assert seen(script, "cleo")[:2] == [START, "ann"]
    entries = {entry["author"]: entry for entry in state["handles"]}
    assert attends(engine, entries["cleo"], entries["ann"])
