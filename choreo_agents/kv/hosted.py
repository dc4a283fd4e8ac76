"""The host memory of a cache's entries, which know what they have there."""

from __future__ import annotations

from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store.host import HostTier
from choreo_agents.kv.tiers import HostKV


class HostedEntries(HostTier[CacheEntry]):
    """See `HostTier`."""

    def put(self, key: CacheEntry, kv: HostKV) -> list[tuple[CacheEntry, HostKV]]:
        """See `HostTier`."""
        left = super().put(key, kv)
        key.hosted_bytes = self.bytes_of(key)
        return left

    def take(self, key: CacheEntry) -> HostKV | None:
        """See `HostTier`."""
        kv = super().take(key)
        key.hosted_bytes = 0
        return kv
