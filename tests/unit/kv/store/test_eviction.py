"""The one policy of all that keeps KV within a budget."""

from __future__ import annotations

from choreo_agents.kv.store.eviction import leaving


def test_what_leaves_is_no_more_than_has_to() -> None:
    held = [("a", 4), ("b", 0), ("c", 3), ("d", 5)]
    assert list(leaving(held, 0)) == [] == list(leaving(held, -3))
    assert list(leaving(held, 1)) == ["a"] == list(leaving(held, 4))
    assert list(leaving(held, 5)) == ["a", "b", "c"]
    assert list(leaving(held, 99)) == ["a", "b", "c", "d"], "all of it, if that is not enough either"
