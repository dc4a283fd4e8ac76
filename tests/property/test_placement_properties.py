"""Offsets given and omitted at random, and views moved as a whole."""

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.engine.messages.message import place


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 50)), max_size=6), st.none() | st.integers(0, 60)
)
def test_given_offsets_stand_and_relative_ones_survive_a_move(parents, new_offset) -> None:
    lengths, offsets = [length for length, _ in parents], [offset for _, offset in parents]
    placed = place(lengths, offsets, new_offset)
    following = 0
    for length, asked, got in zip(lengths, offsets, placed.offsets, strict=True):
        assert got == (following if asked is None else asked)
        following = got + length
    assert placed.position == (following if new_offset is None else new_offset)
    moved = place(lengths, [offset + 13 for offset in placed.offsets], placed.position + 13)
    assert moved.relative() == placed.relative() == tuple(offset - placed.position for offset in placed.offsets)
    assert moved.end(lengths, 3) == placed.end(lengths, 3) + 13
