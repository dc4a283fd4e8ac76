"""Where the KV of every message is: in the pool, on the host, on disk, or nowhere, to be computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.disk_thread import DiskThread
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV, HostTier, Stored, shapes_of, stored_bytes
from choreo_agents.tracing import EventSink, Ledger, discard

_UNWRITTEN_BYTES = 1 << 28
"""On their way to the disk at once, about."""


@dataclass(eq=False)
class CacheEntry:
    """The KV of one message, wherever it is.

    device   segment         read and written by steps
    host     kv          in the host tier, or staged on its way to or from the disk
    disk     on_disk         a file named by the message's id
    lost     none of them    lineage says how to compute it again
    """

    key: str
    """The message's id."""
    tokens: int
    native_offset: int
    """The position that its first token was encoded at: what computes it again encodes it there."""
    segment: Segment | None = None
    staged: HostKV | None = None
    """On the host, whatever the host tier's budget, for as long as a request waits for it or the disk does."""
    on_disk: bool = False
    writing: Future[list[str]] | None = None
    """Under way to the disk; staged until it is there."""
    fetching: Future[HostKV | None] | None = None
    """Under way from the disk."""
    arriving: Arrival | None = None
    """Of the step that brought it into the pool last, and may be at it still."""
    wanted: int = 0
    """Requests that wait to read it: it may leave the pool, but is kept on the host at least."""
    pins: int = 0
    """How often it was pinned: it stays in the pool."""
    stored: Stored = "full"
    used: int = 0
    tenant: str = ""
    """Whose it is."""

    @property
    def file(self) -> str:
        """Its key on disk: keys are stored as rotated, so the position belongs to it."""
        return f"{self.key}-{self.native_offset}"

    def idle(self) -> bool:
        """Whether it is in the pool and nothing keeps it there."""
        return self.segment is not None and self.segment.pins == 1 and not self.pins

    def keeps(self) -> bool:
        """Whether it is kept below the pool: of what is rather made again, only what a request waits for."""
        return self.stored != "low-rank" or self.wanted > 0

    def fill(self, pool: KVPool, segment: Segment, kv: HostKV, arrivals: list[Arrival] | None) -> None:
        """Bring its KV into a segment: now or, with a list of arrivals, in the step that these are given to."""
        full = kv.dequantized(pool.geometry.dtype)
        if arrivals is None:
            pool.write(segment, full)
            return
        from_disk = self.on_disk and self.writing is None
        segment.encoded, self.arriving = self.tokens, Arrival(segment, full, kv, from_disk)
        arrivals.append(self.arriving)

    def withdraw(self, pool: KVPool, arrival: Arrival) -> None:
        """It did not arrive: it is again where it was."""
        arrival.end(is_there=False)
        self.segment, self.staged, self.arriving = None, arrival.stored, None
        pool.unpin(arrival.segment)

    def kept(self, pool: KVPool) -> HostKV:
        """What is kept of it there."""
        assert self.segment is not None
        kv = pool.read(self.segment)
        return kv.quantized() if self.stored == "int8" else kv


@dataclass
class Movements:
    """What moved between the tiers so far."""

    evicted: int = 0
    """Messages that left the pool."""
    restored_from_host: int = 0
    restored_from_disk: int = 0
    recomputed: int = 0
    lost: int = 0
    """Messages that left the last tier, to be computed again when they are read."""
    adopted: int = 0
    """Messages whose KV was encoded elsewhere."""


RESTORED = ("restored_from_host", "restored_from_disk")
"""What a message that came back counts as; the second if from the disk."""


class KVCache:
    """The pool and the tiers below it. Used under the engine's lock only.

    Args:
        pool: Device memory.
        host: What leaves the pool goes here.
        disk: What leaves the host goes here; None: it is lost.
        movements: What it counts them in.
        sink: Told of files that could not be used.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Called from the disk's thread when something that was asked of it is done."""

    def __init__(
        self,
        pool: KVPool,
        host: HostTier[CacheEntry],
        disk: DiskThread | None,
        movements: Ledger[Movements] | None = None,
        sink: EventSink = discard,
    ) -> None:
        self.pool = pool
        self.movements = Ledger(Movements) if movements is None else movements
        self._host = host
        self._disk = disk
        self._entries: set[CacheEntry] = set()
        self._emit = sink
        self._files: dict[str, CacheEntry] = {}
        """Who has a file on disk, or one under way, by its key there."""
        self._clock = itertools.count(1)

    def hold(self, entry: CacheEntry) -> CacheEntry:
        """Keep a message's KV; takes over its segment's pin."""
        self.touch(entry)
        self._entries.add(entry)
        return entry

    def drop(self, entry: CacheEntry) -> None:
        """Forget a message's KV in every tier; readers that have pinned its segment keep that."""
        self._entries.remove(entry)
        self._host.take(entry)
        if entry.segment is not None:
            self.pool.unpin(entry.segment)
        if self._disk is not None and (entry.on_disk or entry.writing is not None):
            self._files.pop(entry.file, None)
            self._disk.drop(entry.file)
        entry.segment = entry.staged = entry.writing = entry.fetching = None
        entry.on_disk = False

    def refill(self, entry: CacheEntry, segment: Segment) -> None:
        """A lost message was encoded again; takes over the segment's pin."""
        if entry.segment is not None or segment.encoded != entry.tokens:
            raise KVMemoryError(f"a message of {entry.tokens} tokens is filled with {segment.encoded}, or twice")
        entry.segment, entry.native_offset = segment, segment.native_offset
        self.touch(entry)

    def lost(self, entry: CacheEntry) -> bool:
        """Whether it has to be computed again."""
        self._arrive(entry)
        anywhere = entry.segment is not None or entry.staged is not None or entry in self._host
        return not (anywhere or entry.on_disk)

    def fetch(self, entry: CacheEntry) -> bool:
        """Whether `restore` can bring it into the pool at once; if not because it is on disk, begin to read it."""
        self._arrive(entry)
        if entry.segment is not None or entry.staged is not None or entry in self._host:
            return True
        if entry.on_disk and entry.fetching is None and self._disk is not None:
            shapes = shapes_of(self.pool.geometry, entry.tokens, quantized=entry.stored == "int8")
            entry.fetching = self._disk.get(entry.file, shapes, self.wake)
        return False

    def restore(self, entry: CacheEntry, arrivals: list[Arrival] | None = None) -> bool:
        """Bring it into the pool, now or as an arrival that is added to a list; False if there is no room for it."""
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
        try:
            entry.fill(self.pool, segment, kv, arrivals)
        except BaseException:
            entry.staged = kv
            self.pool.unpin(segment)
            raise
        self.movements.add(entry.tenant, RESTORED[entry.on_disk and entry.writing is None])
        entry.segment = segment
        if entry.writing is None:
            entry.staged = None
        return True

    def evictable_tokens(self) -> int:
        """Room in the pool that evicting everything idle would give."""
        return sum(e.segment.capacity for e in self._entries if e.segment is not None and e.idle())

    def evict(self, tokens: int) -> None:
        """Take the least recently used idle messages out of the pool until it has room for `tokens`, or none is left.

        Those that a waiting request wants go last.
        """
        if self.pool.free_tokens >= tokens:
            return
        for entry in sorted((e for e in self._entries if e.idle()), key=lambda e: (e.wanted > 0, e.used)):
            self._leave(entry)
            if self.pool.free_tokens >= tokens:
                return

    def park(self, entries: Iterable[CacheEntry]) -> None:
        """Take idle messages out of the pool."""
        for entry in entries:
            if entry.idle():
                self._leave(entry)

    def entries_of(self, tenant: str | None) -> list[CacheEntry]:
        """All of a tenant's, or of everybody's."""
        return [entry for entry in self._entries if tenant in (None, entry.tenant)]

    def want(self, entry: CacheEntry) -> None:
        """A request waits to read it."""
        entry.wanted += 1

    def unwant(self, entry: CacheEntry) -> None:
        """It does no longer; what was staged for it goes where its tier's budget lets it."""
        if not entry.wanted:
            raise KVMemoryError(f"message {entry.key!r} is wanted by fewer requests than gave it up")
        entry.wanted -= 1
        if not entry.keeps():
            held, entry.staged = self._host.take(entry) or entry.staged, None
            self.movements.add(entry.tenant, "lost", held is not None)
        if entry.wanted or entry not in self._entries or entry.staged is None or entry.writing is not None:
            return
        kv, entry.staged = entry.staged, None
        if not entry.on_disk:
            self._to_host(entry, kv)

    def holder(self, segment: Segment) -> CacheEntry | None:
        """Whose KV is in a segment, of the messages that are kept."""
        return next((entry for entry in self._entries if entry.segment is segment), None)

    def bytes_by_tier(self, tenant: str | None = None) -> dict[str, int]:
        """What each tier holds now, of one tenant or of all; the disk's files of other engines are not counted."""
        self._arrive_all()
        entries = self.entries_of(tenant)
        host = sum(self._host.bytes_of(e) + (0 if e.staged is None else e.staged.nbytes) for e in entries)
        disk = sum(e.tokens * stored_bytes(self.pool.geometry, e.stored) for e in entries if e.on_disk)
        return {"device": self.pool.used_by(tenant), "host": host, "disk": disk}

    def check(self) -> None:
        """Assert that entries and tiers agree."""
        self._arrive_all()
        self._host.check()
        for entry in self._entries:
            assert entry.wanted >= 0 and entry.pins >= 0
            if entry.segment is not None:
                assert entry.segment.pins > 0 and entry.segment.encoded == entry.tokens
                assert entry not in self._host and (entry.staged is None or entry.writing is not None)

    def _leave(self, entry: CacheEntry) -> None:
        """Out of the pool, to wherever there is a place."""
        assert entry.segment is not None
        segment = entry.segment
        copied = entry.keeps() and entry.staged is None and (entry.wanted or not entry.on_disk)
        kv = entry.kept(self.pool) if copied else None
        entry.segment = None
        self.pool.unpin(segment)
        self.movements.add(entry.tenant, "evicted")
        self.movements.add(entry.tenant, "lost", not entry.keeps())
        if kv is not None and entry.on_disk:
            entry.staged = kv
        elif kv is not None:
            self._to_host(entry, kv)

    def _to_host(self, entry: CacheEntry, kv: HostKV) -> None:
        for leaving, left in self._host.put(entry, kv):
            if leaving.wanted:
                leaving.staged = left
            else:
                self._to_disk(leaving, left)

    def _to_disk(self, entry: CacheEntry, kv: HostKV) -> None:
        """Written by the disk's thread; until it is there the kv stays on the host."""
        if self._disk is None or not self._disk.is_open:
            self.movements.add(entry.tenant, "lost")
            return
        entry.staged = kv
        entry.writing = self._disk.put(entry.file, kv)
        self._files[entry.file] = entry
        writing = [e for e in self._entries if e.writing is not None]
        if sum(e.tokens for e in writing) * self.pool.geometry.bytes_per_token > _UNWRITTEN_BYTES:
            # The disk is slower than what leaves for it: wait, rather than fill the host.
            for slow in writing:
                self._arrive(slow, wait=True)

    def _arrive(self, entry: CacheEntry, *, wait: bool = False) -> None:
        """Take note of what the disk's thread has done for it."""
        if entry.writing is not None and (wait or entry.writing.done()):
            removed = [entry.file] if entry.writing.exception() is not None else entry.writing.result()
            entry.writing = None
            entry.on_disk = True
            for file in removed:
                self._removed(file)
            if not entry.wanted or entry.segment is not None:
                entry.staged = None
        if entry.fetching is not None and entry.fetching.done():
            kv = None if entry.fetching.exception() is not None else entry.fetching.result()
            entry.fetching = None
            for event in () if self._disk is None else self._disk.skipped():
                self._emit(event)
            if kv is None:
                self._removed(entry.file)
                entry.on_disk = False
            elif entry.wanted and entry.segment is None and entry.staged is None:
                entry.staged = kv

    def _removed(self, file: str) -> None:
        """A file is not there any more; whose it was may be lost."""
        entry = self._files.get(file)
        if entry is None:
            return
        # It was written before it was removed.
        self._arrive(entry)
        if entry.writing is not None:
            return  # once more, meanwhile
        if self._files.pop(file, None) is None or not entry.on_disk:
            return
        entry.on_disk = False
        anywhere = entry.segment is not None or entry in self._host or (entry.staged is not None and entry.wanted)
        self.movements.add(entry.tenant, "lost", not anywhere)

    def _arrive_all(self) -> None:
        for entry in self._entries:
            self._arrive(entry)

    def touch(self, entry: CacheEntry) -> None:
        """It was used just now."""
        entry.used = next(self._clock)
