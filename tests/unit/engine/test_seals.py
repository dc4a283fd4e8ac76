"""A seal is of one content, one kind and one key."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.engine.messages.seals import Seals

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(plain, plain)
def test_only_the_same_content_has_the_same_seal(one: object, other: object) -> None:
    seals = Seals(b"key", salted=True)
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert seals.holds(seals.seal("a", one), "a", other) == same
    assert seals.holds(seals.seal("a", one), "a", json.loads(json.dumps(one)))
    assert not seals.holds(seals.seal("a", one), "b", one)
    assert not Seals(b"other", salted=True).holds(seals.seal("a", one), "a", one)


def test_what_is_no_seal_and_no_plain_content_holds_nothing() -> None:
    seals = Seals(b"key", salted=False)
    endless: list[object] = []
    endless.append(endless)
    for seal in (None, 5, "", "é", "x" * 32, [], {}):
        assert not seals.holds(seal, "a", 1)
    for content in (object(), endless, {1: {2}}, b"x"):
        assert not seals.holds("0" * 32, "a", content)


def test_names_are_drawn_for_names() -> None:
    seals = Seals(b"key", salted=False)
    assert seals.drawn("a", "b") == seals.drawn("a", "b") != seals.drawn("ab")


@pytest.mark.parametrize("one, other", [(True, 1), (1, 1.0), (0, False), ({"a": 1}, {"a": True})])
def test_what_json_tells_apart_is_not_the_same(one: object, other: object) -> None:
    seals = Seals(b"key", salted=True)
    seal = seals.seal("kind", one)
    assert seals.holds(seal, "kind", one) and not seals.holds(seal, "kind", other)


def test_what_is_not_plain_holds_nothing() -> None:
    seals = Seals(b"key", salted=True)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for content in (object(), deep, {1, 2}, threading.Lock()):
        assert not seals.holds("0" * 32, "kind", content)
