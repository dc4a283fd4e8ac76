"""The reducer of the `handles` channel."""

import pytest

from choreo_agents.graph import langgraph_internals
from choreo_agents.graph.state import HandleEntry, merge_entries, merge_updates


def entry(author: str, superstep: int, branch: int, message_id: str) -> HandleEntry:
    handle = {"id": "0" * 32, "model": "m", "length": 1}
    return HandleEntry(
        handle=handle,
        author=author,
        superstep=superstep,
        branch=branch,
        call=0,
        confidential=False,
        message_id=message_id,
        digest="",
    )


def test_the_reducer_appends_and_replaces_in_place() -> None:
    one, two, again = entry("a", 0, 0, "1"), entry("b", 0, 0, "2"), entry("a", 4, 0, "1")
    assert merge_entries([one], [two]) == [one, two]
    assert merge_entries([one, two], [again]) == [again, two]


def test_the_reducer_takes_missing_sides_and_changes_neither() -> None:
    one = [entry("a", 0, 0, "1")]
    assert merge_entries(None, one) == merge_entries(one, None) == merge_entries(one, []) == one
    assert merge_entries(None, None) == []
    left, right = [entry("a", 0, 0, "1")], [entry("b", 0, 0, "1")]
    merge_entries(left, right)
    assert left == [entry("a", 0, 0, "1")] and right == [entry("b", 0, 0, "1")]


def test_an_old_langgraph_keeps_all_entries_in_every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, is_whole in (("1.2.7", True), ("1.2.20", False), ("1.3.0rc1", False), ("1.10", False)):
        monkeypatch.setattr(langgraph_internals, "version", lambda _, found=found: found)
        channel = langgraph_internals.growing(merge_entries, merge_updates)
        assert (channel is merge_entries) is is_whole
