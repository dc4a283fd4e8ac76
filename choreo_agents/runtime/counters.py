"""What the runtime has done so far, in numbers that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choreo_agents.tracing import PerTenantCounters


@dataclass
class Counters:
    """Totals since the engine started; changed under the engine's lock only."""

    tokens_encoded: int = 0
    """Tokens that went through the model for the first time."""
    tokens_of_other_models: int = 0
    """Of those: in words that another model had said, encoded here for its readers."""
    tokens_reused: int = 0
    """Tokens that calls attended to, or asked to prefill, and found encoded; to prefill: or lost since."""
    tokens_recomputed: int = 0
    """Tokens that went through the model again, since memory had lost them."""
    tokens_mapped: int = 0
    """Tokens whose KV a cache mapper made of other KV, for the first time; no pass encoded them."""
    steps: int = 0
    rows: int = 0
    """Requests served, summed over steps."""
    decode_steps: int = 0
    """Steps that sampled at least one token."""
    decode_rows: int = 0
    """Requests served in those steps."""
    decode_unfinished: int = 0
    """Requests submitted and unfinished at the start of those steps, summed over them."""
    kv_bytes_read: int = 0
    """KV memory that steps have read: a segment once for all rows of a step that see it, ..."""
    kv_bytes_unshared: int = 0
    """... and what they would have read, had every row read its own view, as an engine without sharing does."""
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


def count_step(
    counters: PerTenantCounters[Counters],
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
    counted = [(counters.total, sum(rows.values()), sum(sampled.values()), unfinished)]
    counted += [(counters.of(each)[1], rows[each], sampled.get(each, 0), there.get(each, 0)) for each in rows]
    for counts, served, said, begun in counted:
        counts.steps += 1
        counts.rows += served
        if said:
            counts.decode_steps += 1
            counts.decode_rows += served
            counts.decode_unfinished += begun


def count_encoded(counters: PerTenantCounters[Counters], encoded: Mapping[tuple[str, tuple[str, ...]], int]) -> None:
    """Count tokens that a step has encoded, by tenants and by the names of what they count as."""
    for (tenant, names), tokens in encoded.items():
        for name in names:
            counters.add(tenant, name, tokens)
