"""What there may be too much of, and what is said then."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling


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
