"""What the runtime has done so far, in numbers that only grow; and what one request pays for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from choreo_agents.kv.segment import Segment
from choreo_agents.tracing import Ledger

CountedAs = tuple[str, bool, bool, bool]
"""Whose tokens a request encodes, whether memory had lost them, a mapper makes them, another model has said them."""


@dataclass
class Charges:
    """Tokens that steps have encoded for a request: its own, and those of messages that somebody had to encode for it.

    Every token that the engine encodes is charged to one request.
    """

    encoded: int = 0
    """For the first time."""
    recomputed: int = 0
    """Since memory had lost them."""
    mapped: int = 0
    """Made of other KV by a cache mapper instead."""
    foreign: int = 0
    """Of those for the first time: in words that another model had said."""
    for_others: dict[Segment, int] = field(default_factory=dict)
    """How many of all these stand in messages other than its own, by where their KV is."""


@dataclass
class Counters:
    """Totals since the engine started; changed under the engine's lock only."""

    steps: int = 0
    rows: int = 0
    """Requests served, summed over steps."""
    decode_steps: int = 0
    """Steps that sampled at least one token."""
    decode_rows: int = 0
    """Requests served in those steps."""
    decode_unfinished: int = 0
    """Requests submitted and unfinished at the start of those steps, summed over them."""
    tokens_encoded: int = 0
    """For the first time."""
    tokens_of_other_models: int = 0
    """Of those: in words that another model had said."""
    tokens_recomputed: int = 0
    """Since memory had lost them."""
    tokens_mapped: int = 0
    """Tokens whose KV a cache mapper made of other KV, for the first time."""
    tokens_reused: int = 0
    """Tokens that calls attended to, or asked to prefill, and found encoded."""
    kv_bytes_read: int = 0
    """KV memory that steps have read: a segment once for all rows of a step that see it, ..."""
    kv_bytes_read_alone: int = 0
    """... and what they would have read, had every row read its own view."""
    finished: int = 0
    cancelled: int = 0
    failed: int = 0

    def count_step(self, rows: int, sampled: int, unfinished: int) -> None:
        """Count a step of so many rows, of which some sampled, when so many requests were unfinished."""
        self.steps += 1
        self.rows += rows
        if sampled:
            self.decode_steps += 1
            self.decode_rows += rows
            self.decode_unfinished += unfinished

    def count(self, tokens: int, *, again: bool, mapped: bool, foreign: bool = False) -> None:
        """Count tokens that a step has encoded."""
        if again:
            self.tokens_recomputed += tokens
        elif mapped:
            self.tokens_mapped += tokens
        else:
            self.tokens_encoded += tokens
            self.tokens_of_other_models += tokens if foreign else 0


def count_step(
    counters: Ledger[Counters],
    rows: Mapping[str, int],
    sampled: Mapping[str, int],
    there: Mapping[str, int],
    unfinished: int,
) -> None:
    """Count a step: for everybody, and for each tenant as if its own rows were all that it held.

    Args:
        counters: Count it.
        rows: How many are whose.
        sampled: Of those that sampled, likewise.
        there: Of the requests that were there when it began, likewise.
        unfinished: How many these were.
    """
    counters.total.count_step(sum(rows.values()), sum(sampled.values()), unfinished)
    for tenant, count in rows.items():
        counters.of(tenant)[1].count_step(count, sampled.get(tenant, 0), there.get(tenant, 0))


def count_encoded(counters: Ledger[Counters], encoded: Mapping[CountedAs, int]) -> None:
    """Count tokens that a step has encoded."""
    for (tenant, again, mapped, foreign), tokens in encoded.items():
        for each in counters.of(tenant):
            each.count(tokens, again=again, mapped=mapped, foreign=foreign)
