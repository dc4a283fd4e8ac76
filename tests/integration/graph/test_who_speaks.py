"""Who has said a message, and behind which graphs: however these are nested, kept and called, with namesakes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import task
from langgraph.graph import StateGraph
from langgraph.types import Command, Send

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine
from choreo_agents.testing import Script

QUESTION: Any = {"messages": [("user", "Where is the kite?")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}
KINDS = ("ours", "stock")
KEPT = (None, True)


@pytest.fixture
def script() -> Script:
    numbers = count()
    return Script(default=lambda call: f"{call.agent} says {next(numbers)}.")


@pytest.fixture
def engine(script: Script) -> Iterator[Engine]:
    with script.load() as engine:
        yield engine
        engine.check()


def graph(kind: str, nodes: dict[str, Any], engine: Engine) -> Any:
    """Nodes one after the other, in a graph of ours or of LangGraph's; its agents read everyone."""
    made: Any = ChoreoGraph() if kind == "ours" else StateGraph(ChoreoState)
    before = START
    for name, node in nodes.items():
        made.add_node(name, Agent(name, engine=engine, reads={"*": "shared"}) if node is Agent else node)
        made.add_edge(before, name, **({"visibility": {}} if kind == "ours" else {}))
        before = name
    return made.add_edge(before, END)


def compiled(made: Any, engine: Engine, checkpointer: Any = None) -> Any:
    return made.compile(checkpointer, **({"engine": engine} if isinstance(made, ChoreoGraph) else {}))


def heard(script: Script, agent: str, number: int = -1) -> list[str | None]:
    """The authors of what an agent saw at its last call, or at another."""
    seen = [call for call in script.calls if call.agent == agent][number].messages
    return [message.author for message in seen if message.author != "public root"]


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_a_reader_sees_what_a_graph_beside_it_says(
    script: Script, engine: Engine, outer: str, inner: str, keeps: Any
) -> None:
    team = compiled(graph(inner, {"scout": Agent}, engine), engine, keeps)
    app = compiled(graph(outer, {"team": team, "writer": Agent}, engine), engine, InMemorySaver())
    for turn in (1, 2):
        app.invoke(QUESTION, THREAD)
        assert heard(script, "writer").count("team|scout") == turn
    assert [call.agent for call in script.calls] == ["team|scout", "writer"] * 2


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("kinds", [(a, b, c) for a in KINDS for b in KINDS for c in KINDS])
def test_namesakes_at_three_levels_are_told_apart(
    script: Script, engine: Engine, kinds: tuple[str, str, str], keeps: Any
) -> None:
    """An agent, a graph beside it that has an agent of its name, and so on; each level reads its own, and it alone."""
    whole: Any = None
    for kind in kinds:
        team = {} if whole is None else {"team": compiled(whole, engine, keeps)}
        last = Agent("last", engine=engine, reads={"scout": "shared"})
        whole = graph(kind, {"scout": Agent, **team, "last": last}, engine)
    compiled(whole, engine, InMemorySaver()).invoke(QUESTION, THREAD)
    for home in ("", "team|", "team|team|"):
        assert set(heard(script, f"{home}last")) == {START, f"{home}scout"}


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("inner", KINDS)
def test_attack_a_private_graph_does_not_speak_under_the_name_of_a_node_outside(
    script: Script, engine: Engine, inner: str, keeps: Any
) -> None:
    team = compiled(graph(inner, {"scout": Agent}, engine), engine, keeps)
    outer = ChoreoGraph().add_node(Agent("scout")).add_node("team", team)
    outer.add_node(Agent("writer", reads={"scout": "shared", "team": "private"}))
    outer.add_edge(START, "scout").add_edge("scout", "team").add_edge("team", "writer", visibility={})
    app = outer.compile(InMemorySaver(), engine=engine)
    for _ in range(2):
        state = app.invoke(QUESTION, THREAD)
    assert heard(script, "writer").count("scout") == 2
    assert "team|scout" not in heard(script, "writer")
    assert {entry["author"] for entry in state["handles"]} == {START, "scout", "team|scout", "writer"}


@pytest.mark.parametrize("keeps", KEPT)
def test_the_audit_of_a_run_names_who_spoke_in_a_graph(engine: Engine, keeps: Any) -> None:
    team = ChoreoGraph().add_node(Agent("scout", system="There are 12 boxes.")).add_edge(START, "scout")
    outer = ChoreoGraph().add_node("team", team.compile(keeps, engine=engine)).add_node(Agent("writer"))
    app = outer.add_edge(START, "team").add_edge("team", "writer").compile(InMemorySaver(), engine=engine)
    found = app.audit(app.invoke(QUESTION, THREAD)).findings
    assert ("team|scout.system", "writer") in {(each.context, each.reader) for each in found}


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("inner", KINDS)
def test_graphs_that_one_function_calls_are_its_own(script: Script, engine: Engine, inner: str, keeps: Any) -> None:
    """The second and third are counted by LangGraph; nodes that are called by numbers are none the less nodes."""
    within = compiled(graph(inner, {"2": Agent}, engine), engine, keeps)
    team = compiled(graph(inner, {"1": within}, engine), engine, keeps)

    def calls(state: Any) -> Any:
        said = [team.invoke(state)["messages"][-1] for _ in range(3)]
        return {"messages": said}

    outer = ChoreoGraph().add_node("1", calls).add_node("2", Agent("2")).add_node(Agent("writer"))
    outer.add_edge(START, "1").add_edge("1", "2").add_edge(["1", "2"], "writer")
    state = outer.compile(InMemorySaver(), engine=engine).invoke(QUESTION, THREAD)
    assert [call.agent for call in script.calls] == ["1|1|2"] * 3 + ["2", "writer"]
    assert heard(script, "writer") == [START, "1|1|2", "1|1|2", "1|1|2", "2"]
    assert len({message.id for message in state["messages"]}) == 6


@pytest.mark.parametrize("keeps", [False, None])
@pytest.mark.parametrize("inner", KINDS)
def test_branches_of_a_graph_say_messages_of_their_own(script: Script, engine: Engine, inner: str, keeps: Any) -> None:
    team = compiled(graph(inner, {"scout": Agent}, engine), engine, keeps)
    outer = ChoreoGraph().add_node("team", team).add_node(Agent("writer"))
    outer.add_conditional_edges(START, lambda state: [Send("team", state), Send("team", state)], ["team"])
    state = outer.add_edge("team", "writer").compile(InMemorySaver(), engine=engine).invoke(QUESTION, THREAD)
    assert len({message.id for message in state["messages"]}) == 4
    assert heard(script, "writer") == [START, "team|scout", "team|scout"]


@pytest.mark.parametrize("speaks", ["agent", "words"])
def test_attack_a_task_of_a_function_is_no_node(script: Script, engine: Engine, speaks: str) -> None:
    """LangGraph runs it beside the nodes, under its own name."""
    helper = Agent("helper", engine=engine)

    @task(name="scout")
    def asked(state: Any) -> Any:
        return helper.invoke(state)["messages"] if speaks == "agent" else [AIMessage("SECRET")]

    def team(state: Any) -> Any:
        return {"messages": asked(state).result()}

    outer = ChoreoGraph().add_node(Agent("scout")).add_node("team", team)
    outer.add_node(Agent("writer", reads={"scout": "shared", "team": "private"}))
    outer.add_edge(START, "scout").add_edge("scout", "team").add_edge("team", "writer", visibility={})
    outer.compile(engine=engine).invoke(QUESTION)
    assert heard(script, "writer") == [START, "scout"]


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("speaks", ["agent", "function"])
@pytest.mark.parametrize("inner", KINDS)
def test_attack_what_a_graph_sends_to_the_one_around_it_stays_its_own(
    script: Script, engine: Engine, inner: str, speaks: str, keeps: Any
) -> None:
    def up(_: Any) -> Any:
        return Command(graph=Command.PARENT, goto="writer", update={"messages": [AIMessage("SECRET")]})

    def upwards(said: Any) -> Any:
        return Command(graph=Command.PARENT, goto="writer")

    node = up if speaks == "function" else Agent("scout", engine=engine, on_output=upwards)
    made: Any = ChoreoGraph() if inner == "ours" else StateGraph(ChoreoState)
    made.add_node("scout", node).add_edge(START, "scout")
    outer = ChoreoGraph().add_node(Agent("scout")).add_node("team", compiled(made, engine, keeps))
    outer.add_node(Agent("writer", reads={"scout": "shared", "team": "private"}))
    outer.add_edge(START, "scout").add_edge("scout", "team")
    outer.compile(InMemorySaver(), engine=engine).invoke(QUESTION, THREAD)
    assert heard(script, "writer") == [START, "scout"]


@pytest.mark.parametrize("returned", ["answer", "state"])
@pytest.mark.parametrize("inner", KINDS)
def test_attack_a_run_that_a_function_begins_anew_speaks_for_that_function(
    script: Script, engine: Engine, inner: str, returned: str
) -> None:
    """With a config of its own: LangGraph does not take it for nested."""
    team = compiled(graph(inner, {"scout": Agent}, engine), engine)

    def calls(state: Any) -> Any:
        said = team.invoke(state, {"configurable": {"mine": 1}})
        return said if returned == "state" else {"messages": said["messages"][-1:]}

    outer = ChoreoGraph().add_node(Agent("scout")).add_node("team", calls)
    outer.add_node(Agent("writer", reads={"scout": "shared", "team": "private"}))
    outer.add_edge(START, "scout").add_edge("scout", "team").add_edge("team", "writer", visibility={})
    outer.compile(engine=engine).invoke(QUESTION)
    call = next(call for call in script.calls if call.agent == "writer")
    assert [message.text for message in call.messages[1:]] == ["Where is the kite?", "scout: scout says 0."]


@pytest.mark.parametrize("reader", ["writer", "squad|writer"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("inner", KINDS)
def test_attack_a_private_graphs_function_is_no_input_outside(
    script: Script, engine: Engine, inner: str, reads: bool, reader: str
) -> None:
    """Also if an agent in there, for whom it may be that, has encoded its words."""
    agents = {"scout": Agent} if reads else {}
    team = compiled(graph(inner, {"tells": lambda _: {"messages": [AIMessage("SECRET")]}, **agents}, engine), engine)
    writer: Any = Agent("writer")
    beside = reader.split("|", maxsplit=1)[0]
    if beside != "writer":
        writer = compiled(graph("ours", {"writer": writer}, engine), engine)
    outer = ChoreoGraph().add_node("team", team).add_node(beside, writer).add_edge(START, "team")
    outer.add_edge("team", beside, visibility="private").compile(engine=engine).invoke(QUESTION)
    assert heard(script, reader) == [START]
