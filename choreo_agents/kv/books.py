"""What is where, and what of it may leave the pool: counted as it changes, and looked up without going through it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator

from choreo_agents.kv.entry import NOTHING, CacheEntry, Counted, TierName

Entries = OrderedDict[CacheEntry, None]


class KVBooks:
    """Of one cache. Used under the engine's lock only.

    Args:
        disk_bytes: What the file of an entry takes.
    """

    def __init__(self, disk_bytes: Callable[[CacheEntry], int]) -> None:
        self._disk_bytes = disk_bytes
        self._resident: Entries = OrderedDict()
        """What is in the pool, in the order in which it was last used."""
        self._resident_of: dict[str, Entries] = {}
        """The same by tenant."""
        self._pinned: dict[str, Entries] = {}
        """What stays in the pool until it is unpinned, by tenant."""
        self.idle_tokens: Counter[str] = Counter()
        """Room in the pool that what nothing keeps there takes, by tenant."""
        self.idle_total = 0
        self.host_bytes: Counter[str] = Counter()
        self.disk_bytes: Counter[str] = Counter()
        self.told: Callable[[CacheEntry], None] = lambda entry: None
        """Called when an entry is in another tier, or pinned or not any more."""

    def open(self, entry: CacheEntry) -> None:
        """Count an entry from now on."""
        entry.changed = self._changed
        entry.hold_on_to()
        self._changed(entry)

    def close(self, entry: CacheEntry) -> None:
        """It counts no more."""
        entry.changed = None
        entry.hold_on_to()
        self._count(entry, NOTHING)

    def of(self, entry: CacheEntry) -> Counted:
        """What an entry counts for as it is."""
        in_memory = entry.staged is not None or entry.hosted_bytes > 0
        # What has a file that outlives the engine may have none any more: who tells of it asks.
        tier: TierName = "host" if in_memory else "disk" if entry.on_disk else "lineage"
        return Counted(
            "device" if entry.segment is not None else tier,
            entry.hosted_bytes + (0 if entry.staged is None else entry.staged.nbytes),
            self._disk_bytes(entry) if entry.on_disk else 0,
            entry.segment.capacity if entry.segment is not None and entry.idle() else 0,
            entry.pins > 0,
        )

    def touch(self, entry: CacheEntry) -> None:
        """It was used just now."""
        if entry in self._resident:
            self._resident.move_to_end(entry)
            self._resident_of[entry.tenant].move_to_end(entry)

    def resident(self, tenant: str | None = None) -> Iterable[CacheEntry]:
        """What is in the pool, of one tenant or of all: the longest unused first."""
        return self._resident if tenant is None else self._resident_of.get(tenant, ())

    def pinned(self, tenant: str) -> Iterable[CacheEntry]:
        """What a tenant has pinned."""
        return self._pinned.get(tenant, ())

    def every_pinned(self) -> Iterator[CacheEntry]:
        """What all tenants have pinned."""
        return (entry for entries in self._pinned.values() for entry in entries)

    def check(self, entries: Iterable[CacheEntry]) -> None:
        """Assert that all that is counted is there, and counted as it is."""
        every = list(entries)
        assert all(entry.counted == self.of(entry) for entry in every)
        assert all(entry.segment is None or entry.segment.holder is entry for entry in every)
        assert {*self._resident} == {entry for entry in every if entry.segment is not None}
        by_tenant = [entry for entries in self._resident_of.values() for entry in entries]
        assert {*by_tenant} == {*self._resident} and len(by_tenant) == len(self._resident)
        assert {e for held in self._pinned.values() for e in held} == {entry for entry in every if entry.pins}
        for name in ("idle_tokens", "host_bytes", "disk_bytes"):
            expected: Counter[str] = Counter()
            for entry in every:
                expected[entry.tenant] += getattr(entry.counted, name)
            assert +expected == getattr(self, name), f"{name} are counted otherwise than they are"
        assert self.idle_total == self.idle_tokens.total()

    def _changed(self, entry: CacheEntry) -> None:
        self._count(entry, self.of(entry))

    def _count(self, entry: CacheEntry, now: Counted) -> None:
        before, entry.counted = entry.counted, now
        if now.tier != before.tier and "device" in (now.tier, before.tier):
            self._move(entry, now.tier == "device")
        if now == before:
            return
        tenant = entry.tenant
        self.idle_total += now.idle_tokens - before.idle_tokens
        for counts, more in (
            (self.idle_tokens, now.idle_tokens - before.idle_tokens),
            (self.host_bytes, now.host_bytes - before.host_bytes),
            (self.disk_bytes, now.disk_bytes - before.disk_bytes),
        ):
            if more:
                counts[tenant] += more
                if not counts[tenant]:
                    del counts[tenant]
        if now.is_pinned and not before.is_pinned:
            self._pinned.setdefault(tenant, OrderedDict())[entry] = None
        elif before.is_pinned and not now.is_pinned:
            _take(self._pinned, entry)
        if (now.tier, now.is_pinned) != (before.tier, before.is_pinned):
            self.told(entry)

    def _move(self, entry: CacheEntry, is_there: bool) -> None:
        """Into the pool, or out of it."""
        if is_there:
            self._resident[entry] = None
            self._resident_of.setdefault(entry.tenant, OrderedDict())[entry] = None
        else:
            del self._resident[entry]
            _take(self._resident_of, entry)


def _take(by_tenant: dict[str, Entries], entry: CacheEntry) -> None:
    del by_tenant[entry.tenant][entry]
    if not by_tenant[entry.tenant]:
        del by_tenant[entry.tenant]
