"""Which messages attend together: few buckets, little padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_COST = 4096
"""What one more bucket costs, ..."""
KEY_COST = 24
"""... and what a key costs besides being scored, both in pairs of query and key that could be scored instead."""
_STEPS = 8
"""Lengths that are told apart between one power of two and the next."""


@dataclass(frozen=True)
class Bucket:
    """Messages by number, padded to the longest of them."""

    members: tuple[int, ...]
    queries: int
    """The most tokens of its own that one of them has, ..."""
    keys: int
    """... and the most that one sees, its own among them."""


def bucketed(queries: Sequence[int], keys: Sequence[int]) -> list[Bucket]:
    """Cut messages into buckets of like lengths, at the least cost among cuts of one order.

    Args:
        queries: Tokens of each message.
        keys: Tokens that each sees, its own among them.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for number, (query, key) in enumerate(zip(queries, keys, strict=True)):
        # By powers of two of the queries first: one long message must not stretch many short ones.
        classes.setdefault((math.ceil(math.log2(query)), _rounded(key)), []).append(number)
    ordered = [classes[name] for name in sorted(classes)]
    longest = [(max(queries[i] for i in group), max(keys[i] for i in group)) for group in ordered]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ordered) + 1):
        found = (math.inf, 0)
        members, query, key = 0, 0, 0
        for start in range(end - 1, -1, -1):
            members += len(ordered[start])
            query, key = max(query, longest[start][0]), max(key, longest[start][1])
            cost = best[start][0] + BUCKET_COST + members * key * (query + KEY_COST)
            found = min(found, (cost, start))
        best.append(found)
    cuts: list[Bucket] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        those = tuple(i for group in ordered[start:end] for i in group)
        cuts.append(Bucket(those, max(queries[i] for i in those), max(keys[i] for i in those)))
        end = start
    return cuts[::-1]


def _rounded(length: int) -> int:
    """Up to a multiple of an eighth of its power of two."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * _STEPS))
    return -(-length // step) * step
