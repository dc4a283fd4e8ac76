"""The one policy of all that keeps KV within a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.kv.store.eviction import LongestUnused, leaving

KEYS = "abcdef"
ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove", "pin", "unpin"]), st.sampled_from(KEYS), st.integers(0, 9)),
    max_size=40,
)


def test_what_leaves_is_no_more_than_has_to() -> None:
    held = [("a", 4), ("b", 0), ("c", 3), ("d", 5)]
    assert list(leaving(held, 0)) == [] == list(leaving(held, -3))
    assert list(leaving(held, 1)) == ["a"] == list(leaving(held, 4))
    assert list(leaving(held, 5)) == ["a", "b", "c"]
    assert list(leaving(held, 99)) == ["a", "b", "c", "d"], "all of it, if that is not enough either"


def test_what_was_used_since_leaves_after_what_was_not() -> None:
    order: LongestUnused[str] = LongestUnused()
    for key in ("a", "b", "c"):
        order.add(key, 1)
    order.use("a")
    assert order.leaving(1) == ["b", "c"] and order.leaving(2) == ["b"]


@given(ACTS, st.integers(0, 40), st.sets(st.sampled_from(KEYS)) | st.none())
def test_the_longest_unused_leaves_and_never_what_is_pinned(
    acts: list[tuple[str, str, int]], most: int, among: set[str] | None
) -> None:
    order: LongestUnused[str] = LongestUnused()
    kept: list[list[object]] = []  # key, bytes, pins: the longest unused first
    for act, key, number in acts:
        known = next((each for each in kept if each[0] == key), None)
        if act == "remove":
            order.remove(key)
            kept = [each for each in kept if each is not known]
        elif act == "add" and known is None:
            order.add(key, number)
            kept.append([key, number, 0])
        elif known is not None and act == "use":
            order.use(key)
            kept.remove(known)
            kept.append(known)
        elif known is not None and act == "pin":
            order.pin(key)
            known[2] += 1  # type: ignore[operator]
        elif known is not None and act == "unpin" and known[2]:
            order.unpin(key)
            known[2] -= 1  # type: ignore[operator]
    there = [(str(key), int(str(nbytes)), pins) for key, nbytes, pins in kept if among is None or key in among]
    wanted: list[str] = []
    for key, _, pins in there:
        if sum(nbytes for each, nbytes, _ in there if each not in wanted) > most and not pins:
            wanted.append(key)
    assert order.leaving(most, among) == wanted
    assert order.used_bytes == sum(int(str(nbytes)) for _, nbytes, _ in kept)
    assert all((key in order) == any(each[0] == key for each in kept) for key in KEYS)
    assert all(order.is_pinned(str(key)) == bool(pins) for key, _, pins in kept)
