"""Rows and notes come back from their plain values as they were, through JSON; what is not theirs is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.engine.lineage import Answered, DamagedRowError, LineageRow, Note
from choreo_agents.engine.lineage.sealed import SealedRows
from choreo_agents.engine.messages.seals import Seals

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
SEALED = SealedRows(Seals(b"key", salted=True))


@st.composite
def rows(draw: st.DrawFn) -> LineageRow:
    parents = draw(st.lists(st.tuples(IDS, st.integers(-1000, 1000)), max_size=4))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=9))
    return LineageRow(draw(IDS), draw(st.text(max_size=9)), tuple(tokens), tuple(parents), draw(st.integers(0, 99)))


SAMPLED = st.tuples(
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
    usage=st.just(()) | st.just((3, 4, None, 0.5, 0, 0, 0, 0)),
    authors=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    marked=st.booleans(),
    is_thought=st.booleans(),
    sources=st.lists(IDS, max_size=2).map(tuple),
    foreign=st.lists(st.tuples(IDS, st.text(max_size=5), st.integers(1, 9)), max_size=2).map(tuple),
    thoughts=st.lists(st.tuples(IDS, st.none() | st.text(max_size=5)), max_size=2).map(tuple),
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(rows())
def test_a_row_is_what_it_was(row: LineageRow) -> None:
    assert LineageRow.read(through_json(row.plain())) == row
    assert SEALED.read_row(through_json(SEALED.row(row))) == row


@given(NOTES)
def test_a_note_is_what_it_was(note: Note) -> None:
    assert Note.read(through_json(note.plain())) == note
    assert SEALED.read_note("t", through_json(SEALED.note("t", note))) == note
    with pytest.raises(DamagedRowError, match="seal"):
        SEALED.read_note("another thread", SEALED.note("t", note))


@given(st.builds(Answered, st.text(), IDS))
def test_an_answer_is_what_it_was(answered: Answered) -> None:
    assert Answered.read(through_json(answered.plain())) == answered
    assert SEALED.read_answer("t", through_json(SEALED.answer("t", answered))) == answered
    with pytest.raises(DamagedRowError, match="seal"):
        SEALED.read_answer("another thread", SEALED.answer("t", answered))
    with pytest.raises(DamagedRowError, match="seal"):
        SEALED.read_note("t", SEALED.answer("t", answered))


@given(rows(), st.data())
def test_whatever_is_changed_is_seen(row: LineageRow, data: st.DataObject) -> None:
    sealed = SEALED.row(row)
    name = data.draw(st.sampled_from(sorted(sealed)))
    other = data.draw((st.none() | st.text() | st.lists(st.integers())).filter(lambda each: each != sealed[name]))
    with pytest.raises(DamagedRowError):
        SEALED.read_row({**sealed, name: other})
    with pytest.raises(DamagedRowError):
        SEALED.read_row({key: value for key, value in sealed.items() if key != name})
    with pytest.raises(DamagedRowError):
        SealedRows(Seals(b"other", salted=True)).read_row(sealed)


@pytest.mark.parametrize(
    "plain",
    [{}, {"v": 2, "id": "a"}, {"v": 1}, {"v": 1, "id": "a", "model": "m", "tokens": [], "parents": [], "at": 0}],
)
def test_what_is_no_row_is_refused(plain: Any) -> None:
    with pytest.raises(DamagedRowError):
        LineageRow.read(plain)


def test_a_thread_is_not_told_by_its_name() -> None:
    assert "ann@example" not in SEALED.thread("ann@example.org") and "." not in SEALED.thread("ann@example.org")
    assert SEALED.thread("a") != SEALED.thread("b") != SealedRows(Seals(b"x", salted=True)).thread("b")
