"""Functions that are declared to say nothing: routers, counters and barriers, through which sight goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.types import Command, Overwrite, Send
from support.graphs import QUESTION

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Policy
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.testing import Script


class State(ChoreoState, total=False):
    """Rounds that are over."""

    rounds: int


def team(barrier: str | None = None, **edges: Any) -> ChoreoGraph:
    """ann and bob speak at once; cleo sees both, by a barrier or as it is declared by hand, and dan after her.

    Args:
        barrier: How they are seen by what waits for them; None: it is nobody's reader, and each edge is declared.
        edges: Options of its nodes.
    """
    graph = ChoreoGraph(State)
    for name in ("ann", "bob", "cleo", "dan"):
        graph.add_node(Agent(name, system=f"Notes of {name}.", **edges.get(name, {})))
    graph.add_edge(START, "ann").add_edge(START, "bob")
    declared: Any = {"visibility": {}} if barrier is None else {"visibility": barrier, "history": "last"}
    graph.add_node(
        "count", lambda state: {"rounds": state.get("rounds", 0) + 1}, writes=None if barrier is None else ()
    )
    graph.add_edge(["ann", "bob"], "count", **declared)
    graph.add_conditional_edges("count", lambda _: "cleo", ["cleo"], visibility={} if barrier is None else None)
    return graph.add_edge("cleo", "dan").add_edge("dan", END)


def heard(graph: ChoreoGraph) -> dict[str | None, list[tuple[str | None, str]]]:
    """What each agent saw of whom."""
    script = Script({name: f"{name} has spoken." for name in ("ann", "bob", "cleo", "dan")})
    with script.load() as engine:
        graph.compile(engine=engine).invoke(QUESTION)
    return {call.agent: [(message.author, message.text) for message in call.messages] for call in script.calls}


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_who_comes_after_a_barrier_sees_whom_it_waited_for(mode: Any) -> None:
    by_hand = team()
    for name in ("ann", "bob"):
        by_hand.set_visibility(name, "cleo", mode, history="last")
    passed = team(mode)
    assert heard(passed) == heard(by_hand)
    assert [author for author, _ in heard(passed)["cleo"] if author in ("ann", "bob")] == ["ann", "bob"]
    assert passed.visibility_table()["cleo"]["ann"] == by_hand.visibility_table()["cleo"]["ann"]
    told = [
        {(each.context, each.reader, each.channel) for each in graph.audit().findings} for graph in (passed, by_hand)
    ]
    assert told[0] <= told[1], "it adds nothing to what its readers have"


def test_private_on_the_way_leaves_out_of_the_view_and_promises_nothing() -> None:
    graph = team("private").set_visibility("ann", "dan", "private")
    seen = heard(graph)
    assert not {"ann", "bob"} & {author for author, _ in seen["cleo"]}
    report = graph.audit()
    assert not report.violations and "count" not in str(report.findings)


def test_a_pair_that_is_declared_stays_as_it_is() -> None:
    graph = team("reencoded").set_visibility("ann", "cleo", "private")
    table = graph.visibility_table()["cleo"]
    assert table["ann"].mode.keeps_out and table["bob"].mode.encodes_again
    assert [author for author, _ in heard(graph)["cleo"] if author in ("ann", "bob")] == ["bob"]


def test_what_is_confidential_is_not_passed_on() -> None:
    graph = team("shared", ann={"confidential": True})
    assert [author for author, _ in heard(graph)["cleo"] if author in ("ann", "bob")] == ["bob"]
    inner = ChoreoGraph().add_node(Agent("spy", confidential=True)).add_edge(START, "spy")
    outer = ChoreoGraph()
    with Script(default="Hm.").load() as engine:
        outer.add_node("team", inner.compile(engine=engine)).add_node("wait", lambda _: {}, writes=())
        outer.add_node(Agent("boss")).add_edge(START, "team").add_edge("team", "wait").add_edge("wait", "boss")
        assert "team" not in outer.visibility_table().get("boss", {})


def test_a_policy_holds_on_the_way_through() -> None:
    graph = team("shared").with_policy(Policy(confidential={"ann.system": {"ann"}}, channels={"encoding"}))
    with Script(default="Hm.").load() as engine, pytest.raises(VisibilityError, match="ann =shared, last=> cleo"):
        graph.compile(engine=engine)
    mended = graph.with_policy(
        Policy(confidential={"ann.system": {"ann"}}, channels={"encoding"}, on_violation="reencode")
    )
    with Script(default="Hm.").load() as engine:
        assert mended.compile(engine=engine).builder.visibility_table()["cleo"]["ann"].mode.encodes_again


def reworded(state: Any) -> Any:
    return state["messages"][-1].model_copy(update={"content": "I speak."})


def test_a_router_sends_on_what_stands_in_the_state() -> None:
    graph = ChoreoGraph(State).add_node(Agent("ann")).add_node(Agent("cleo"))
    graph.add_node("route", lambda state: Command(goto=Send("cleo", state)), writes=(), destinations=("cleo",))
    graph.add_edge(START, "ann").add_edge("ann", "route").set_visibility("ann", "cleo").add_edge("cleo", END)
    assert [author for author, _ in heard(graph)["cleo"] if author == "ann"] == ["ann"]


SAYS: dict[str, Callable[[Any], Any]] = {
    "messages": lambda _: {"messages": [AIMessage("I speak.")]},
    "none": lambda _: {"messages": []},
    "a command": lambda _: Command(update={"messages": [AIMessage("I speak.")]}, goto="cleo"),
    "its parent's": lambda _: Command(graph=Command.PARENT, update={"messages": [AIMessage("I speak.")]}),
    "pairs": lambda _: [("rounds", 1), ("messages", [AIMessage("I speak.")])],
    "several": lambda _: [{"rounds": 1}, Command(update=[("handles", [])])],
    "handles": lambda state: {"handles": state["handles"]},
    "a send": lambda _: Command(goto=Send("cleo", {"messages": [AIMessage("I speak.")]})),
    "a send of several": lambda _: [Command(goto=Send("cleo", {"messages": [AIMessage("I speak.")]}))],
    "a send in other words": lambda state: Command(goto=Send("cleo", {"messages": [reworded(state)]})),
    "in place of all": lambda _: {"messages": Overwrite([])},
    "the whole state": lambda state: state,
}


@pytest.mark.parametrize("says", SAYS.values(), ids=[*SAYS])
def test_who_says_something_after_all_is_told(says: Callable[[Any], Any]) -> None:
    inner = ChoreoGraph(State).add_node("wait", says, writes=())
    inner.add_node(Agent("cleo")).add_edge(START, "wait").add_edge("wait", "cleo")
    with Script(default="Hm.").load() as engine:
        outer = ChoreoGraph(State).add_node("team", inner.compile(engine=engine)).add_edge(START, "team")
        for app in (inner.compile(engine=engine), outer.compile(engine=engine)):
            with pytest.raises(
                VisibilityError, match=r"wait' was added with writes=\(\), but writes '(messages|handles)'"
            ):
                app.invoke(QUESTION)


@pytest.mark.parametrize("node", [Agent("ann"), ChoreoGraph(), str], ids=["agent", "graph", "names"])
def test_only_functions_are_declared_to_say_nothing(node: Any) -> None:
    writes: Any = ()
    with Script(default="Hm.").load() as engine:
        if isinstance(node, ChoreoGraph):
            node = node.add_node(Agent("ann")).add_edge(START, "ann").compile(engine=engine)
        elif node is str:
            writes = ("rounds",)
        with pytest.raises(InvalidRequestError, match=r"only \(\)"):
            ChoreoGraph().add_node("x", node, writes=writes)
