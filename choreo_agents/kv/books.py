"""Running totals of a cache by tier and tenant, updated on every change so that reading them needs no scan."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from choreo_agents.kv.entry import CacheEntry


class KVBooks:
    """Entries of one cache, counted by tier. Used under the engine's lock only."""

    def __init__(self) -> None:
        self._resident: OrderedDict[CacheEntry, None] = OrderedDict()
        self.idle_tokens = 0
        """Tokens of the pool taken by entries that may be evicted."""
        self.host_bytes: Counter[str] = Counter()
        """Bytes on the host, by tenant."""
        self.disk_tokens: Counter[str] = Counter()
        """Tokens in the engine's own files, by tenant."""

    def open(self, entry: CacheEntry) -> None:
        """Start to count an entry."""
        entry.changed = self._changed
        entry.update_holder()
        self._changed(entry)

    def close(self, entry: CacheEntry) -> None:
        """Stop counting an entry."""
        entry.changed = None
        entry.update_holder()
        self._resident.pop(entry, None)
        self._count(entry, 0, (0, 0))

    def touch(self, entry: CacheEntry) -> None:
        """Mark an entry as most recently used."""
        if entry in self._resident:
            self._resident.move_to_end(entry)

    def resident(self) -> Iterable[CacheEntry]:
        """Return the entries in the pool, least recently used first."""
        return self._resident

    def check(self, entries: Iterable[CacheEntry]) -> None:
        """Assert that the totals agree with `entries`."""
        every = list(entries)
        assert all(entry.idle_tokens == _idle_tokens(entry) for entry in every)
        assert all(entry.segment is None or entry.segment.holder is entry for entry in every)
        assert {*self._resident} == {entry for entry in every if entry.segment is not None}
        assert self.idle_tokens == sum(entry.idle_tokens for entry in every)
        for place, counts in enumerate((self.host_bytes, self.disk_tokens)):
            assert all(counts.values()) and +counts == sum(
                (Counter({e.tenant: _below(e)[place]}) for e in every), Counter()
            )

    def _changed(self, entry: CacheEntry) -> None:
        if entry.segment is None:
            self._resident.pop(entry, None)
        else:
            self._resident.setdefault(entry)  # keeps its place, if it has one
        self._count(entry, _idle_tokens(entry), _below(entry))

    def _count(self, entry: CacheEntry, idle_tokens: int, below: tuple[int, int]) -> None:
        self.idle_tokens += idle_tokens - entry.idle_tokens
        for counts, now, before in zip((self.host_bytes, self.disk_tokens), below, entry.below, strict=True):
            if now != before:
                counts[entry.tenant] += now - before
                if not counts[entry.tenant]:
                    del counts[entry.tenant]
        entry.idle_tokens, entry.below = idle_tokens, below


def _idle_tokens(entry: CacheEntry) -> int:
    return entry.segment.capacity if entry.segment is not None and entry.idle() else 0


def _below(entry: CacheEntry) -> tuple[int, int]:
    """Return an entry's bytes on the host, and its tokens in the engine's own files."""
    staged = 0 if entry.staged is None else entry.staged.nbytes
    return entry.hosted_bytes + staged, entry.tokens * entry.on_disk
