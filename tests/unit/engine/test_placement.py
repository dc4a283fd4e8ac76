"""Where messages appear when offsets are given, omitted or wrong."""

import pytest

from choreo_agents.engine.messages.message import Lineage, Placement, place
from choreo_agents.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("lengths", "offsets", "position", "wanted"),
    [
        ([], None, None, Placement((), 0)),
        ([], [], 7, Placement((), 7)),
        ([3, 4], None, None, Placement((0, 3), 7)),
        ([3, 4], [None, None], None, Placement((0, 3), 7)),
        ([3, 4], [10, None], None, Placement((10, 13), 17)),
        ([3, 4], [None, 20], None, Placement((0, 20), 24)),
        ([3, 4], [8, 0], None, Placement((8, 0), 4)),
        ([3, 4], [0, 0], None, Placement((0, 0), 4)),
        ([3, 4], [0, 1], 2, Placement((0, 1), 2)),
        ([3, 4], None, 100, Placement((0, 3), 100)),
        ([3, 4], None, 0, Placement((0, 3), 0)),
    ],
    ids=str,
)
def test_what_is_omitted_follows_what_is_before_it(lengths, offsets, position, wanted: Placement) -> None:
    assert place(lengths, offsets, position) == wanted


@pytest.mark.parametrize("offsets", [[], [0], [0, 1, 2]])
def test_a_wrong_number_of_offsets_is_refused(offsets: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"2 parents but {len(offsets)} offsets"):
        place([3, 4], offsets, None)


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "3"])
def test_an_offset_that_is_no_position_is_refused_by_name(wrong) -> None:
    with pytest.raises(InvalidRequestError, match=rf"offsets\[1\].*{wrong!r}"):
        place([3, 4], [0, wrong], None)
    with pytest.raises(InvalidRequestError, match=f"position.*{wrong!r}"):
        place([3, 4], None, wrong)


def test_the_end_is_what_nothing_reaches_even_if_a_parent_reaches_furthest() -> None:
    assert Placement((0, 3), 7).end([3, 4], 2) == 9
    assert Placement((50, 3), 7).end([3, 4], 2) == 53
    assert Placement((), 5).end([], 1) == 6


def test_the_end_needs_a_length_for_each_parent() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Placement((0, 3), 7).end([3], 2)


def test_a_message_and_what_it_has_seen_move_together() -> None:
    moved = Lineage((5,), (), Placement((3, 40), 50)).at(70)
    assert moved.placement == Placement((23, 60), 70) and moved.placement.relative() == (-47, -10)
