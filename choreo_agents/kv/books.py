"""What is in the pool, and what of it may leave: counted as it changes, and looked up without going through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from choreo_agents.kv.entry import CacheEntry


class KVBooks:
    """The entries of one cache that are in the pool. Used under the engine's lock only."""

    def __init__(self) -> None:
        self._resident: OrderedDict[CacheEntry, None] = OrderedDict()
        self.idle_tokens = 0
        """Room in the pool that what nothing keeps there takes."""

    def open(self, entry: CacheEntry) -> None:
        """Count an entry from now on."""
        entry.changed = self._changed
        entry.hold_on_to()
        self._changed(entry)

    def close(self, entry: CacheEntry) -> None:
        """Count it no more."""
        entry.changed = None
        entry.hold_on_to()
        self._resident.pop(entry, None)
        self._count(entry, 0)

    def touch(self, entry: CacheEntry) -> None:
        """Note that it was used just now."""
        if entry in self._resident:
            self._resident.move_to_end(entry)

    def resident(self) -> Iterable[CacheEntry]:
        """Return what is in the pool: the longest unused first."""
        return self._resident

    def check(self, entries: Iterable[CacheEntry]) -> None:
        """Assert that all that is counted is there, and counted as it is."""
        every = list(entries)
        assert all(entry.idle_tokens == _idle_tokens(entry) for entry in every)
        assert all(entry.segment is None or entry.segment.holder is entry for entry in every)
        assert {*self._resident} == {entry for entry in every if entry.segment is not None}
        assert self.idle_tokens == sum(entry.idle_tokens for entry in every)

    def _changed(self, entry: CacheEntry) -> None:
        if entry.segment is None:
            self._resident.pop(entry, None)
        else:
            self._resident.setdefault(entry)  # in its place, if it is there
        self._count(entry, _idle_tokens(entry))

    def _count(self, entry: CacheEntry, idle_tokens: int) -> None:
        self.idle_tokens += idle_tokens - entry.idle_tokens
        entry.idle_tokens = idle_tokens


def _idle_tokens(entry: CacheEntry) -> int:
    return entry.segment.capacity if entry.segment is not None and entry.idle() else 0
