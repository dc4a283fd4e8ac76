"""Counters of what the runtime has done, which only grow."""

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
    """Of those, tokens of text that another model generated, encoded here for its readers."""
    tokens_reused: int = 0
    """Tokens that calls attended to, or submitted as a prefill, and found encoded; a prefill's may have been evicted
    since."""
    tokens_recomputed: int = 0
    """Tokens that were encoded again after memory had lost them."""
    tokens_mapped: int = 0
    """Tokens whose KV a cache mapper computed from other KV, for the first time; no pass encoded them."""
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
    """Bytes of KV that steps have read, a segment once for all rows of a step that see it, ..."""
    kv_bytes_unshared: int = 0
    """... and what they would have read, had every row read its own view, as in an engine without sharing."""
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


def count_step(
    counters: PerTenantCounters[Counters],
    rows: Mapping[str, int],
    sampled: Mapping[str, int],
    present: Mapping[str, int],
    unfinished: int,
) -> None:
    """Count a step in the total, and for each tenant as if it had held only that tenant's rows.

    Args:
        counters: Counters to update.
        rows: Number of rows by tenant.
        sampled: Number of rows that sampled, by tenant.
        present: Number of requests unfinished when the step began, by tenant.
        unfinished: Sum of those.
    """
    counted = [(counters.total, sum(rows.values()), sum(sampled.values()), unfinished)]
    counted += [(counters.of(name)[1], rows[name], sampled.get(name, 0), present.get(name, 0)) for name in rows]
    for counts, served, sampled_rows, begun in counted:
        counts.steps += 1
        counts.rows += served
        if sampled_rows:
            counts.decode_steps += 1
            counts.decode_rows += served
            counts.decode_unfinished += begun


def count_encoded(counters: PerTenantCounters[Counters], encoded: Mapping[tuple[str, tuple[str, ...]], int]) -> None:
    """Count tokens that a step has encoded, by tenant and by the names of the counters that they go into."""
    for (tenant, names), tokens in encoded.items():
        for name in names:
            counters.add(tenant, name, tokens)
