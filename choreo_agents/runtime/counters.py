"""What the runtime has done so far, in numbers that only grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.tracing import Ledger


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
    counters: Ledger[Counters], rows: Sequence[tuple[str, bool]], there: Sequence[str], unfinished: int
) -> None:
    """Count a step: for everybody, and for each tenant as if its own rows were all that it held.

    Args:
        counters: Count it.
        rows: The tenant of each row, and whether it sampled.
        there: The tenants of those requests that were there when it began.
        unfinished: How many they were.
    """
    counters.total.count_step(len(rows), sum(sampled for _, sampled in rows), unfinished)
    own, sampled = Counter(tenant for tenant, _ in rows), Counter(tenant for tenant, samples in rows if samples)
    here = Counter(there)
    for tenant, count in own.items():
        counters.own(tenant).count_step(count, sampled[tenant], here[tenant])
