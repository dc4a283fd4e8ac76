"""What there may be too much of, and what is said then."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.provenance import MOST_MESSAGES


@pytest.mark.parametrize("form", [list, tuple])
def test_more_messages_than_a_state_may_hold_are_refused_before_anything_is_done(engine: Engine, form: type) -> None:
    app = (
        ChoreoGraph()
        .add_node(Agent("ann", sampling=Sampling(max_tokens=2)))
        .add_edge(START, "ann")
        .compile(engine=engine)
    )
    before = engine.stats()
    many = form([HumanMessage("No.")] * (MOST_MESSAGES + 1))
    with pytest.raises(InvalidRequestError, match=r"would hold 100,001 messages, more than 100,000.*RemoveMessage"):
        app.invoke({"messages": many})
    assert engine.stats() == before


def test_an_agent_reads_no_more_than_that_in_a_stock_graph_either(engine: Engine) -> None:
    agent = Agent("ann", sampling=Sampling(max_tokens=2), engine=engine)
    with pytest.raises(InvalidRequestError, match="100,001 messages"):
        agent.invoke({"messages": [HumanMessage("No.")] * (MOST_MESSAGES + 1)})


def test_more_answers_than_one_call_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 4096"):
        Sampling(n=200_000)
    assert Sampling(n=4096).n == 4096


class Own:
    """A client's own, which nothing can copy, compare or write as JSON."""

    def __deepcopy__(self, _: object) -> object:
        raise TypeError("it cannot be copied")

    def __eq__(self, other: object) -> bool:
        raise ValueError("it cannot be compared")

    __hash__ = None  # type: ignore[assignment]


def nested(depth: int) -> object:
    """A list in a list."""
    found: object = "x"
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("kept", [Own(), nested(600), nested(5000)], ids=["its own", "deep", "very deep"])
def test_what_a_node_keeps_on_its_messages_is_its_own_matter(engine: Engine, kept: object) -> None:
    def says(_: object) -> dict[str, object]:
        return {"messages": [AIMessage("Four.", additional_kwargs={"kept": kept}, response_metadata={"kept": kept})]}

    short = Sampling(max_tokens=2, stop_tokens=())
    graph = (
        ChoreoGraph()
        .add_node("says", says)
        .add_node(Agent("ann", sampling=short))
        .add_node(Agent("bob", sampling=short))
    )
    graph.add_edge(START, "says").add_edge("says", "ann").add_edge("ann", "bob").set_visibility("says", "bob")
    state = graph.compile(engine=engine).invoke({"messages": "What?"})
    assert [entry["author"] for entry in state["handles"]] == [START, "says", "ann", "bob"]
