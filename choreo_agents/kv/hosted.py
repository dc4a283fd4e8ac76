"""The host memory in which KV waits that has left the pool."""

from __future__ import annotations

from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.tiers import HostKV


class HostedEntries:
    """KV in host memory, within a budget. Entries know what they have there.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._kept: dict[CacheEntry, HostKV] = {}
        """The longest unused first: what is used leaves, and comes again."""

    def __contains__(self, entry: CacheEntry) -> bool:
        return entry in self._kept

    @property
    def free_bytes(self) -> int:
        """That may come before anything has to leave."""
        return self.budget_bytes - self._used_bytes

    def put(self, entry: CacheEntry, kv: HostKV) -> list[tuple[CacheEntry, HostKV]]:
        """Keep KV; what leaves for it, oldest first: itself if it is larger than the budget."""
        assert entry not in self._kept
        self._kept[entry], entry.hosted_bytes = kv, kv.nbytes
        self._used_bytes += kv.nbytes
        over = list(leaving(((each, held.nbytes) for each, held in self._kept.items()), -self.free_bytes))
        return [(each, held) for each in over if (held := self.take(each)) is not None]

    def peek(self, entry: CacheEntry) -> HostKV | None:
        """KV that stays here."""
        return self._kept.get(entry)

    def take(self, entry: CacheEntry) -> HostKV | None:
        """Hand KV out and forget it."""
        kv = self._kept.pop(entry, None)
        self._used_bytes -= 0 if kv is None else kv.nbytes
        entry.hosted_bytes = 0
        return kv

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert all(entry.hosted_bytes == kv.nbytes for entry, kv in self._kept.items())
        assert self._used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes
