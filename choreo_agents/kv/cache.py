"""KV cache of an engine: which tier holds each message, and how messages move between the tiers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.entry_files import EntryFiles
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.tier_counters import RESTORED, TierCounters
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import PerTenantCounters


class HostedEntries:
    """The host tier: KV that was evicted from the pool, in host memory, within a budget. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._kept: dict[CacheEntry, HostKV] = {}
        """Least recently used first: an entry that is used leaves the host, and is added again."""

    def __contains__(self, entry: CacheEntry) -> bool:
        return entry in self._kept

    @property
    def free_bytes(self) -> int:
        """Bytes that can be added before anything has to leave."""
        return self.budget_bytes - self._used_bytes

    def put(self, entry: CacheEntry, kv: HostKV) -> list[tuple[CacheEntry, HostKV]]:
        """Keep KV; return the entries that leave for it, oldest first, itself if it exceeds the budget alone."""
        assert entry not in self._kept
        self._kept[entry] = kv
        self._used_bytes += kv.nbytes
        over = list(leaving(((old, old_kv.nbytes) for old, old_kv in self._kept.items()), -self.free_bytes))
        return [(old, old_kv) for old in over if (old_kv := self.take(old)) is not None]

    def peek(self, entry: CacheEntry) -> HostKV | None:
        """Return an entry's KV without removing it."""
        return self._kept.get(entry)

    def take(self, entry: CacheEntry) -> HostKV | None:
        """Remove and return an entry's KV."""
        kv = self._kept.pop(entry, None)
        self._used_bytes -= 0 if kv is None else kv.nbytes
        return kv

    def check(self) -> None:
        """Assert that bytes are counted right and within the budget."""
        assert self._used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes


class KVCache:
    """The pool and the tiers below it. Used under the engine's lock only.

    Args:
        pool: Device memory.
        host: Takes KV that leaves the pool.
        files: Take KV that leaves the host.
        tier_counters: Count the moves.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostedEntries,
        files: EntryFiles,
        tier_counters: PerTenantCounters[TierCounters],
    ) -> None:
        self.pool = pool
        self.files = files
        self.tier_counters = tier_counters
        self._host = host
        self._entries: defaultdict[str, set[CacheEntry]] = defaultdict(set)
        """Entries by tenant, so that what others have makes nobody's statistics slower."""
        self._resident: OrderedDict[CacheEntry, None] = OrderedDict()
        """Entries in the pool, least recently used first."""
        self.on_drop: Callable[[str], None] = lambda message_id: None
        """Called with the message of each entry that was dropped."""

    def hold(self, entry: CacheEntry, segment: Segment | None) -> CacheEntry:
        """Add an entry with its segment in the pool, if any, whose pin is taken over."""
        if segment is None:
            self.files.find(entry)
        self._entries[entry.tenant].add(entry)
        self._set_segment(entry, segment)
        return entry

    def drop(self, entry: CacheEntry) -> None:
        """Remove an entry from every tier; a segment stays until its readers unpin it."""
        own = self._entries[entry.tenant]
        own.remove(entry)
        if not own:
            del self._entries[entry.tenant]
        self._host.take(entry)
        segment, entry.staged = entry.segment, None
        self._set_segment(entry, None)
        if segment is not None:
            self.pool.unpin(segment)
        self.files.drop(entry)
        self.on_drop(entry.key)

    def refill(self, entry: CacheEntry, segment: Segment) -> None:
        """Put a lost message that was encoded again into the pool; takes over the segment's pin."""
        if entry.segment is not None or segment.encoded != entry.tokens:
            raise KVMemoryError(f"a message of {entry.tokens} tokens is filled with {segment.encoded}, or twice")
        entry.native_offset = segment.native_offset
        self._set_segment(entry, segment)

    def pin(self, entry: CacheEntry, pins: int) -> None:
        """Set the number of an entry's pins, which keep it in the pool."""
        entry.pins = pins
        if entry.segment is not None:
            self.pool.recount(entry.segment)

    def touch(self, entry: CacheEntry) -> None:
        """Mark an entry as most recently used."""
        if entry in self._resident:
            self._resident.move_to_end(entry)

    def lost(self, entry: CacheEntry) -> bool:
        """Return whether an entry must be computed again."""
        self.files.arrive(entry)
        return not (self.in_memory(entry) or entry.has_file)

    def in_memory(self, entry: CacheEntry) -> bool:
        """Return whether the pool or the host has an entry."""
        return entry.segment is not None or entry.staged is not None or entry in self._host

    def fetch(self, entry: CacheEntry) -> bool:
        """Return whether `restore` can copy an entry into the pool at once; begin to read it if it is on disk."""
        self.files.arrive(entry)
        if self.in_memory(entry):
            return True
        if entry.has_file:
            self.files.fetch(entry)
        return False

    def host_copy(self, entry: CacheEntry) -> HostKV | None:
        """Return an entry's KV on the host, if any."""
        return entry.staged or self._host.peek(entry)

    def restore(self, entry: CacheEntry, arrivals: list[Arrival] | None = None) -> bool:
        """Copy an entry into the pool, now or as one of `arrivals`; return False if the pool is full."""
        self.touch(entry)
        if entry.segment is not None:
            return True
        if entry.staged is None and entry not in self._host:
            raise KVMemoryError(f"message {entry.key!r} is brought into the pool from nowhere")
        segment = self.pool.allocate(entry.tokens, entry.native_offset, entry.tenant)
        if segment is None:
            return False
        kv = self._host.take(entry) or entry.staged
        assert kv is not None
        from_disk = entry.has_file and entry.writing is None
        try:
            if arrivals is None:
                self.pool.write(segment, kv)
            else:
                segment.encoded, entry.arriving = entry.tokens, Arrival(segment, kv, from_disk)
                arrivals.append(entry.arriving)
        except BaseException:
            entry.staged = kv
            self.pool.unpin(segment)
            raise
        self.tier_counters.add(entry.tenant, RESTORED[from_disk])
        self._set_segment(entry, segment)
        if entry.writing is None:
            entry.staged = None
        return True

    def withdraw(self, entry: CacheEntry, arrival: Arrival) -> None:
        """Undo a `restore` whose copy has not been made."""
        arrival.end(is_there=False)
        self._set_segment(entry, None)
        entry.staged, entry.arriving = arrival.kv, None
        self.pool.unpin(arrival.segment)
        self.tier_counters.add(entry.tenant, RESTORED[arrival.from_disk], -1)

    def put_below(self, entry: CacheEntry, kv: HostKV, native_offset: int) -> bool:
        """Put a lost message's KV on the host if it fits without eviction; return whether it does.

        Args:
            entry: Entry of the message.
            kv: Its keys and values.
            native_offset: Position at which its first token was encoded.
        """
        if kv.nbytes > self._host.free_bytes:
            return False
        self._host.put(entry, kv)
        entry.native_offset = native_offset
        return True

    def evict(self, tokens: int) -> None:
        """Evict the least recently used idle messages until `tokens` are free in the pool, or none is left.

        Those that a request waits for go last.
        """
        over = tokens - self.pool.free_tokens
        if over <= 0:
            return
        unwanted = (entry for entry in self._resident if not entry.wanted)
        wanted = (entry for entry in self._resident if entry.wanted)
        candidates = ((entry, entry.idle_tokens) for entry in chain(unwanted, wanted) if entry.idle_tokens)
        self.offload([*leaving(candidates, over)])

    def evict_unwanted(self, tokens: int) -> bool:
        """Evict only messages that no request waits for; return whether `tokens` are free then.

        If that cannot be reached, nothing is evicted.
        """
        waiting_tokens = sum(entry.idle_tokens for entry in self._resident if entry.wanted)
        is_enough = self.pool.free_tokens + self.pool.idle_tokens - waiting_tokens >= tokens
        if is_enough:
            self.evict(tokens)
        return is_enough

    def offload(self, entries: Iterable[CacheEntry]) -> None:
        """Move idle messages out of the pool."""
        for entry in entries:
            if entry.idle_tokens:
                self._leave(entry)

    def want(self, entry: CacheEntry) -> None:
        """Note that a request waits to read an entry."""
        if not entry.wanted and not self.in_memory(entry) and not entry.has_file:
            self.files.find(entry)  # may have been written since; not looked up while another request recomputes it
        entry.wanted += 1

    def unwant(self, entry: CacheEntry) -> None:
        """Undo one `want`; KV that was staged for it moves to the host tier or a file."""
        if not entry.wanted:
            raise KVMemoryError(f"message {entry.key!r} is wanted by fewer requests than gave it up")
        entry.wanted -= 1
        if entry.wanted or entry not in self or entry.staged is None or entry.writing is not None:
            return
        kv, entry.staged = entry.staged, None
        if not self.files.has(entry):
            self._to_host(entry, kv)

    def __contains__(self, entry: CacheEntry) -> bool:
        return entry in self._entries.get(entry.tenant, ())

    def entries_of(self, tenant: str | None) -> list[CacheEntry]:
        """Return the entries of a tenant; None: of all."""
        if tenant is None:
            return [*chain.from_iterable(self._entries.values())]
        return [*self._entries.get(tenant, ())]

    def bytes_by_tier(self, tenant: str | None = None) -> dict[str, Any]:
        """Return the bytes in each tier, of a tenant or of all, as fields of `EngineStats`.

        Files that outlive the engine are not counted.
        """
        self.files.arrive_all()
        own = self.entries_of(tenant)
        on_host = (kv for entry in own for kv in (entry.staged, self._host.peek(entry)) if kv is not None)
        disk_tokens = sum(entry.tokens for entry in own if entry.on_disk)
        return {
            "kv_bytes": self.pool.used_by(tenant),
            "host_bytes": sum(kv.nbytes for kv in on_host),
            "disk_bytes": disk_tokens * self.pool.geometry.bytes_per_token,
        }

    def check(self) -> None:
        """Assert that entries and tiers agree."""
        self.files.arrive_all()
        self._host.check()
        entries = self.entries_of(None)
        assert {*self._resident} == {entry for entry in entries if entry.segment is not None}
        for entry in entries:
            assert entry.staged is None or entry.wanted or entry.writing is not None
            assert entry.wanted >= 0 and entry.pins >= 0
            if entry.segment is not None:
                assert entry.segment.pins > 0 and entry.segment.encoded == entry.tokens
                assert entry.segment.holder is entry
                assert entry not in self._host and (entry.staged is None or entry.writing is not None)

    def _set_segment(self, entry: CacheEntry, segment: Segment | None) -> None:
        """Make a segment an entry's, most recently used; None: the entry is not in the pool any more."""
        if entry.segment is not None:
            self.pool.set_holder(entry.segment, None)
        entry.segment = segment
        if segment is None:
            self._resident.pop(entry, None)
        else:
            self._resident[entry] = None
            self.pool.set_holder(segment, entry)

    def _leave(self, entry: CacheEntry) -> None:
        """Move an entry out of the pool, to the host or a file."""
        assert entry.segment is not None
        segment = entry.segment
        needed = entry.staged is None and (not self.files.has(entry) or entry.wanted)
        kv = self.pool.read(segment) if needed else None
        self._set_segment(entry, None)
        self.pool.unpin(segment)
        self.tier_counters.add(entry.tenant, "evicted")
        if kv is not None and entry.has_file:
            entry.staged = kv
        elif kv is not None:
            self._to_host(entry, kv)

    def _to_host(self, entry: CacheEntry, kv: HostKV) -> None:
        for leaver, leaver_kv in self._host.put(entry, kv):
            if leaver.wanted:
                leaver.staged = leaver_kv
            else:
                self.files.put(leaver, leaver_kv)
