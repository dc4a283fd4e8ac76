"""One reader's view by example."""

import pytest

from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.view import visible
from choreo_agents.graph.visibility import START_SOURCE, VisibilityRule


def entry(author: str, superstep: int = 0, branch: int = 0, message_id: str | None = None) -> HandleEntry:
    name = f"{author}{superstep}{branch}" if message_id is None else message_id
    handle = {"id": "0" * 32, "model": "m", "length": 1}
    return HandleEntry(
        handle=handle, author=author, superstep=superstep, branch=branch, confidential=False, message_id=name, digest=""
    )


def seen(entries: list[HandleEntry], reader: str, rules: dict[str, VisibilityRule]) -> list[str]:
    return [found["message_id"] for found, _ in visible(entries, reader, rules)]


def test_within_a_superstep_input_comes_first_then_ones_own_then_the_declared_order() -> None:
    entries = [entry(author) for author in ("a", "b", "me", START_SOURCE, "c")]
    rules = {source: VisibilityRule() for source in ("c", "a", START_SOURCE, "b")}
    assert seen(entries, "me", rules) == ["__start__00", "me00", "c00", "a00", "b00"]


def test_supersteps_come_before_everything_else() -> None:
    entries = [entry(START_SOURCE, 3), entry("me", 2), entry("a", 1)]
    assert seen(entries, "me", {START_SOURCE: VisibilityRule(), "a": VisibilityRule()}) == [
        "a10",
        "me20",
        "__start__30",
    ]


def test_branches_of_one_author_keep_their_order() -> None:
    entries = [entry("a", 0, branch, message_id) for branch, message_id in ((2, "x"), (10, "y"), (0, "z"), (0, "w"))]
    assert seen(entries, "me", {"a": VisibilityRule()}) == ["w", "z", "x", "y"]


def test_private_and_undeclared_sources_are_never_seen() -> None:
    entries = [entry("a"), entry("b"), entry(START_SOURCE)]
    assert seen(entries, "me", {"a": VisibilityRule("private")}) == []


@pytest.mark.parametrize(
    "rule", [None, VisibilityRule("private"), VisibilityRule("reencoded"), VisibilityRule("shared", "last")], ids=str
)
def test_ones_own_messages_are_always_seen_as_they_were_encoded(rule: VisibilityRule | None) -> None:
    rules = {} if rule is None else {"me": rule}
    found = visible([entry("me", 0), entry("me", 1)], "me", rules)
    assert [(one["superstep"], rule.mode.name) for one, rule in found] == [(0, "shared"), (1, "shared")]


@pytest.mark.parametrize(
    ("history", "supersteps"), [("all", [0, 2, 2, 5]), ("last", [5]), (1, [5]), (2, [2, 2, 5]), (9, [0, 2, 2, 5])]
)
def test_a_history_counts_the_supersteps_in_which_the_source_spoke(history, supersteps: list[int]) -> None:
    entries = [entry("a", 5), entry("a", 2, 1), entry("a", 2), entry("a", 0), entry("b", 7)]
    found = visible(entries, "me", {"a": VisibilityRule("reencoded", history)})
    assert [one["superstep"] for one, _ in found] == supersteps
    assert {rule.mode.name for _, rule in found} == {"reencoded"}
