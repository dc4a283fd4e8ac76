"""What moved between the tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounters:
    """What moved between the tiers so far."""

    evicted: int = 0
    """Messages that left the pool, ..."""
    restored_from_host: int = 0
    """... came back from the host, ..."""
    restored_from_disk: int = 0
    """... came back from the disk, ..."""
    recomputed: int = 0
    """... and were computed again from their lineage."""
    lost: int = 0
    """Messages that left the last tier, to be computed again when they are read."""
    adopted: int = 0
    """Messages whose KV was encoded elsewhere."""
    sent_bytes: int = 0
    """Of KV that was packed for other engines, ..."""
    received_bytes: int = 0
    """... and that came from such."""


RESTORED = ("restored_from_host", "restored_from_disk")
"""What a message that came back counts as; the second if from the disk."""
