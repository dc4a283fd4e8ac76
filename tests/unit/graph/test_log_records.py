"""Records of a thread's log come back from their plain values as they were, through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langgraph.store.memory import InMemoryStore
from support.stored import log_of

from choreo_agents.engine.lineage import LoggedMessage
from choreo_agents.engine.messages.message import Usage
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey
from choreo_agents.sampling import SampledToken

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def keys(draw: st.DrawFn) -> KVKey:
    parents = draw(st.lists(st.tuples(IDS, st.integers(-1000, 1000)), max_size=4))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=9))
    return KVKey(draw(IDS), draw(st.text(max_size=9)), tuple(tokens), tuple(parents), draw(st.integers(0, 99)))


SAMPLED = st.builds(
    SampledToken,
    st.integers(0, 99),
    st.none() | st.floats(-9, 0),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=2).map(tuple),
)
RECORDS = st.builds(
    LoggedMessage,
    IDS,
    answers=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    author=st.none() | st.text(max_size=5),
    role=st.none() | st.sampled_from(["user", "assistant"]),
    label=st.text(max_size=5),
    header=st.integers(0, 9),
    sampled=st.none() | st.integers(0, 9) | st.lists(SAMPLED, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(["stop", "length"]),
    usage=st.none() | st.builds(Usage, st.just(3), st.just(4), st.none() | st.just(0.25), st.just(0.5)),
    authors=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    marked=st.booleans(),
    is_thought=st.booleans(),
    sources=st.lists(IDS, max_size=2).map(tuple),
    foreign=st.lists(
        st.builds(MessageHandle, id=IDS, model=st.text("ab", min_size=1), length=st.integers(1, 9)), max_size=2
    ).map(tuple),
    thoughts=st.lists(st.tuples(IDS, st.none() | st.text(max_size=5)), max_size=2).map(tuple),
)
LOG = log_of(InMemoryStore(), "a thread's id")


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(RECORDS)
def test_a_record_is_what_it_was(record: LoggedMessage) -> None:
    assert LOG._unpacked(through_json(LOG._packed(record, {})), {}) == record


@given(keys(), st.lists(keys(), max_size=3), st.integers(0, 4))
def test_a_key_is_what_it_was(key: KVKey, others: list[KVKey], shared: int) -> None:
    """Alone, and beside others, of which one may have read what it has read."""
    parents = tuple((each, at - 3) for each, at in key.parents[:shared])
    like = replace(key, id="f" * 32, native_offset=key.native_offset + 3, parents=parents)
    known, record = {each.id: each for each in [*others, like]}, LoggedMessage(key.id, key)
    assert LOG._unpacked(through_json(LOG._packed(record, {})), {}) == record
    plain = through_json(LOG._packed(record, known))
    assert LOG._unpacked(plain, known) == record
    assert len(plain["parents"]) <= len(key.parents) - min(shared, len(key.parents))
