"""Counters of KV that moved between device, host and disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounters:
    """Counts of KV that has moved between the tiers."""

    evicted: int = 0
    """Messages that left the pool."""
    restored_from_host: int = 0
    """Messages that came back from the host."""
    restored_from_disk: int = 0
    """Messages that came back from the disk."""
    recomputed: int = 0
    """Messages that were computed again from their lineage."""
    lost: int = 0
    """Messages that left the last tier; they are computed again when they are read."""
    sent_bytes: int = 0
    """Bytes of KV that were packed for other engines."""
    received_bytes: int = 0
    """Bytes of KV that came from other engines."""


RESTORED = ("restored_from_host", "restored_from_disk")
"""Counter of a message that came back; index with True if it came from the disk."""
