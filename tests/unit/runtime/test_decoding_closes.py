"""Tokens that close a message by themselves."""

from __future__ import annotations

from typing import Any, cast

from choreo_agents.runtime.request import Decoding
from choreo_agents.sampling import Sampling


class _Free:
    constraint = None


def decoding(**options: Any) -> Decoding:
    return Decoding(Sampling(), cast(Any, _Free()), frozenset({7, 8, 9}), (7, 5), left_out=frozenset({8}), **options)


def test_nothing_is_added_behind_a_token_that_closes_the_message() -> None:
    closed = decoding(closes=frozenset({9}))
    assert closed.ends([1, 9]) and closed.missing_end([1, 9]) == () and not closed.leaves_out_last([1, 9])
    assert closed.missing_end([1]) == (7, 5) and closed.missing_end([1, 7]) == (5,) and closed.leaves_out_last([1, 8])
    assert decoding().missing_end([1, 9]) == (7, 5)
