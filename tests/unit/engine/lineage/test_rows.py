"""Rows and notes come back from their plain values as they were, through JSON; what is not theirs is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.engine.lineage import DamagedRowError, LineageRow, Note
from choreo_agents.engine.messages.message import Usage
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import SampledToken

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def rows(draw: st.DrawFn) -> LineageRow:
    parents = draw(st.lists(st.tuples(IDS, st.integers(-1000, 1000)), max_size=4))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=9))
    return LineageRow(draw(IDS), draw(st.text(max_size=9)), tuple(tokens), tuple(parents), draw(st.integers(0, 99)))


SAMPLED = st.builds(
    SampledToken,
    st.integers(0, 99),
    st.none() | st.floats(-9, 0),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=2).map(tuple),
)
NOTES = st.builds(
    Note,
    IDS,
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


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(rows(), st.lists(rows(), max_size=3), st.integers(0, 4))
def test_a_row_is_what_it_was(row: LineageRow, others: list[LineageRow], shared: int) -> None:
    """Alone, and beside others, of which one may have read what it has read."""
    like = replace(row, id="f" * 32, at=row.at + 3, parents=tuple((each, at - 3) for each, at in row.parents[:shared]))
    known = {each.id: each for each in [*others, like]}
    assert LineageRow.read(through_json(row.plain()), {}) == row
    plain = through_json(row.plain(known.values()))
    assert LineageRow.read(plain, known) == row
    assert len(plain["parents"]) <= len(row.parents) - min(shared, len(row.parents))


@given(NOTES)
def test_a_note_is_what_it_was(note: Note) -> None:
    assert Note.read(through_json(note.plain())) == note


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"id": "a"},
        {"id": "a", "model": "m", "tokens": [], "parents": [], "at": 0},
        {"id": "a", "model": "m", "tokens": [1], "parents": [], "at": 0, "like": ["b", 1]},
        {"id": "a", "model": "m", "tokens": [1], "parents": [], "at": 0, "like": 3},
    ],
)
def test_what_is_no_row_is_refused(plain: Any) -> None:
    with pytest.raises(DamagedRowError):
        LineageRow.read(plain, {})
