"""What a layout refuses to describe."""

import pytest

from choreo_agents.attention.layout import QuerySpan, Read


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 0},
        {"spans": (QuerySpan(0, 0, 0),)},
        {"spans": (QuerySpan(0, 3, 0),), "causal": True},
        {"spans": (QuerySpan(0, 4, 1),), "causal": True},
        {"spans": (QuerySpan(0, 4, 0), QuerySpan(4, 4, 0)), "causal": True},
    ],
    ids=str,
)
def test_a_read_that_no_kernel_can_serve_is_caught(fields: dict) -> None:
    with pytest.raises(AssertionError):
        Read(**({"start": 0, "length": 4, "position": 0, "spans": (QuerySpan(0, 4, 0),)} | fields))


def test_queries_are_counted_over_all_spans() -> None:
    assert Read(0, 4, 0, (QuerySpan(0, 2, 0), QuerySpan(5, 1, 7))).queries == 3
