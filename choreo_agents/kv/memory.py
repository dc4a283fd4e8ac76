"""Where the KV of every message is: in the pool, on the host, on disk, or nowhere, to be computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import DiskTier, HostTier, Parcel, Stored, shapes_of, stored_bytes

_UNWRITTEN_BYTES = 1 << 28
"""On their way to the disk at once, about."""


@dataclass(eq=False)
class Holding:
    """The KV of one message, wherever it is.

    device   segment         read and written by steps
    host     parcel          in the host tier, or staged on its way to or from the disk
    disk     on_disk         a file named by the message's id
    lost     none of them    lineage says how to compute it again
    """

    key: str
    """The message's id."""
    tokens: int
    native_offset: int
    """The position that its first token was encoded at: what computes it again encodes it there."""
    segment: Segment | None = None
    staged: Parcel | None = None
    """On the host, whatever the host tier's budget, for as long as a request waits for it or the disk does."""
    on_disk: bool = False
    writing: Future[list[str]] | None = None
    """Under way to the disk; staged until it is there."""
    fetching: Future[Parcel | None] | None = None
    """Under way from the disk."""
    arriving: Arrival | None = None
    """Of the step that brought it into the pool last, and may be at it still."""
    wanted: int = 0
    """Requests that wait to read it: it may leave the pool, but is kept on the host at least."""
    pins: int = 0
    """How often it was pinned: it stays in the pool."""
    stored: Stored = "full"
    used: int = 0

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

    def fill(self, pool: KVPool, segment: Segment, parcel: Parcel, arrivals: list[Arrival] | None) -> None:
        """Bring its KV into a segment: now or, with a list of arrivals, in the step that these are given to."""
        full = parcel.unpacked(pool.geometry.dtype)
        if arrivals is None:
            pool.write(segment, full)
            return
        from_disk = self.on_disk and self.writing is None
        segment.encoded, self.arriving = self.tokens, Arrival(segment, full, parcel, from_disk)
        arrivals.append(self.arriving)

    def withdraw(self, pool: KVPool, arrival: Arrival) -> None:
        """It did not arrive: it is again where it was."""
        arrival.end(is_there=False)
        self.segment, self.staged, self.arriving = None, arrival.stored, None
        pool.unpin(arrival.segment)

    def kept(self, pool: KVPool) -> Parcel:
        """What is kept of it there."""
        assert self.segment is not None
        parcel = pool.read(self.segment)
        return parcel.packed() if self.stored == "int8" else parcel


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

    def restored(self, from_disk: bool, more: int = 1) -> None:
        """Count a message that came back; with -1, one that did not after all."""
        if from_disk:
            self.restored_from_disk += more
        else:
            self.restored_from_host += more


class KVCache:
    """The pool and the tiers below it. Used under the engine's lock only, but for its own thread, which does the disk.

    Args:
        pool: Device memory.
        host: What leaves the pool goes here.
        disk: What leaves the host goes here; None: it is lost.
        movements: What it counts them in.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Called from the disk's thread when something that was asked of it is done."""

    def __init__(
        self, pool: KVPool, host: HostTier[Holding], disk: DiskTier | None, movements: Movements | None = None
    ) -> None:
        self.pool = pool
        self.movements = Movements() if movements is None else movements
        self._host = host
        self._disk = disk
        self._holdings: set[Holding] = set()
        self._files: dict[str, Holding] = {}
        """Who has a file on disk, or one under way, by its key there."""
        self._closed = False
        self._clock = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, "choreo-disk") if disk is not None else None

    def hold(self, holding: Holding) -> Holding:
        """Keep a message's KV; takes over its segment's pin."""
        self.touch(holding)
        self._holdings.add(holding)
        return holding

    def drop(self, holding: Holding) -> None:
        """Forget a message's KV in every tier; readers that have pinned its segment keep that."""
        self._holdings.remove(holding)
        self._host.take(holding)
        if holding.segment is not None:
            self.pool.unpin(holding.segment)
        if holding.on_disk or holding.writing is not None:
            self._unlink(holding)
        holding.segment = holding.staged = holding.writing = holding.fetching = None
        holding.on_disk = False

    def refill(self, holding: Holding, segment: Segment) -> None:
        """A lost message was encoded again; takes over the segment's pin."""
        assert holding.segment is None and segment.encoded == holding.tokens
        holding.segment, holding.native_offset = segment, segment.native_offset
        self.touch(holding)

    def lost(self, holding: Holding) -> bool:
        """Whether it has to be computed again."""
        self._arrive(holding)
        anywhere = holding.segment is not None or holding.staged is not None or holding in self._host
        return not (anywhere or holding.on_disk)

    def fetch(self, holding: Holding) -> bool:
        """Whether `restore` can bring it into the pool at once; if not because it is on disk, begin to read it."""
        self._arrive(holding)
        if holding.segment is not None or holding.staged is not None or holding in self._host:
            return True
        if holding.on_disk and holding.fetching is None:
            assert self._disk is not None and self._thread is not None and not self._closed
            shapes = shapes_of(self.pool.geometry, holding.tokens, packed=holding.stored == "int8")
            holding.fetching = self._thread.submit(self._disk.get, holding.file, shapes)
            holding.fetching.add_done_callback(lambda _: self.wake())
        return False

    def restore(self, holding: Holding, arrivals: list[Arrival] | None = None) -> bool:
        """Bring it into the pool, now or as an arrival that is added to a list; False if there is no room for it."""
        self.touch(holding)
        if holding.segment is not None:
            return True
        segment = self.pool.allocate(holding.tokens, holding.native_offset)
        if segment is None:
            return False
        parcel = self._host.take(holding) or holding.staged
        assert parcel is not None, "fetch it first"
        try:
            holding.fill(self.pool, segment, parcel, arrivals)
        except BaseException:
            holding.staged = parcel
            self.pool.unpin(segment)
            raise
        self.movements.restored(holding.on_disk and holding.writing is None)
        holding.segment = segment
        if holding.writing is None:
            holding.staged = None
        return True

    def evictable_tokens(self) -> int:
        """Room in the pool that evicting everything idle would give."""
        return sum(h.segment.capacity for h in self._holdings if h.segment is not None and h.idle())

    def evict(self, tokens: int) -> None:
        """Take the least recently used idle messages out of the pool until it has room for `tokens`, or none is left.

        Those that a waiting request wants go last.
        """
        if self.pool.free_tokens >= tokens:
            return
        for holding in sorted((h for h in self._holdings if h.idle()), key=lambda h: (h.wanted > 0, h.used)):
            self._leave(holding)
            if self.pool.free_tokens >= tokens:
                return

    def park(self, holdings: Iterable[Holding]) -> None:
        """Take idle messages out of the pool."""
        for holding in holdings:
            if holding.idle():
                self._leave(holding)

    def want(self, holding: Holding) -> None:
        """A request waits to read it."""
        holding.wanted += 1

    def unwant(self, holding: Holding) -> None:
        """It does no longer; what was staged for it goes where its tier's budget lets it."""
        holding.wanted -= 1
        assert holding.wanted >= 0
        if not holding.keeps():
            held, holding.staged = self._host.take(holding) or holding.staged, None
            self.movements.lost += held is not None
        if holding.wanted or holding not in self._holdings or holding.staged is None or holding.writing is not None:
            return
        parcel, holding.staged = holding.staged, None
        if not holding.on_disk:
            self._to_host(holding, parcel)

    def pinned(self) -> list[Holding]:
        """What was pinned to stay in the pool."""
        return [holding for holding in self._holdings if holding.pins]

    def bytes_by_tier(self) -> dict[str, int]:
        """What each tier holds now; the disk's files of other engines are not counted."""
        self._arrive_all()
        staged = sum(h.staged.nbytes for h in self._holdings if h.staged is not None)
        disk = sum(h.tokens * stored_bytes(self.pool.geometry, h.stored) for h in self._holdings if h.on_disk)
        return {"device": self.pool.used_bytes, "host": self._host.used_bytes + staged, "disk": disk}

    def close(self) -> None:
        """End the disk's thread after what it was asked to do, and remove what is this engine's in the folder."""
        if self._thread is None or self._disk is None:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        for file in self._files:
            self._disk.drop(file)

    def check(self) -> None:
        """Assert that holdings and tiers agree."""
        self._arrive_all()
        self._host.check()
        for holding in self._holdings:
            assert holding.wanted >= 0 and holding.pins >= 0
            if holding.segment is not None:
                assert holding.segment.pins > 0 and holding.segment.encoded == holding.tokens
                assert holding not in self._host and (holding.staged is None or holding.writing is not None)

    def _leave(self, holding: Holding) -> None:
        """Out of the pool, to wherever there is a place."""
        assert holding.segment is not None
        segment = holding.segment
        copied = holding.keeps() and holding.staged is None and (holding.wanted or not holding.on_disk)
        parcel = holding.kept(self.pool) if copied else None
        holding.segment = None
        self.pool.unpin(segment)
        self.movements.evicted += 1
        self.movements.lost += not holding.keeps()
        if parcel is not None and holding.on_disk:
            holding.staged = parcel
        elif parcel is not None:
            self._to_host(holding, parcel)

    def _to_host(self, holding: Holding, parcel: Parcel) -> None:
        for leaving, left in self._host.put(holding, parcel):
            if leaving.wanted:
                leaving.staged = left
            else:
                self._to_disk(leaving, left)

    def _to_disk(self, holding: Holding, parcel: Parcel) -> None:
        """Written by the disk's thread; until it is there the parcel stays on the host."""
        if self._closed or self._disk is None or self._thread is None:
            self.movements.lost += 1
            return
        holding.staged = parcel
        holding.writing = self._thread.submit(self._disk.put, holding.file, parcel)
        self._files[holding.file] = holding
        writing = [h for h in self._holdings if h.writing is not None]
        if sum(h.tokens for h in writing) * self.pool.geometry.bytes_per_token > _UNWRITTEN_BYTES:
            # The disk is slower than what leaves for it: wait, rather than fill the host.
            for slow in writing:
                self._arrive(slow, wait=True)

    def _arrive(self, holding: Holding, *, wait: bool = False) -> None:
        """Take note of what the disk's thread has done for it."""
        if holding.writing is not None and (wait or holding.writing.done()):
            removed = [holding.file] if holding.writing.exception() is not None else holding.writing.result()
            holding.writing = None
            holding.on_disk = True
            for file in removed:
                self._removed(file)
            if not holding.wanted or holding.segment is not None:
                holding.staged = None
        if holding.fetching is not None and holding.fetching.done():
            parcel = None if holding.fetching.exception() is not None else holding.fetching.result()
            holding.fetching = None
            if parcel is None:
                self._removed(holding.file)
                holding.on_disk = False
            elif holding.wanted and holding.segment is None and holding.staged is None:
                holding.staged = parcel

    def _removed(self, file: str) -> None:
        """A file is not there any more; whose it was may be lost."""
        holding = self._files.get(file)
        if holding is None:
            return
        # It was written before it was removed.
        self._arrive(holding)
        if holding.writing is not None:
            return  # once more, meanwhile
        if self._files.pop(file, None) is None or not holding.on_disk:
            return
        holding.on_disk = False
        anywhere = (
            holding.segment is not None or holding in self._host or (holding.staged is not None and holding.wanted)
        )
        self.movements.lost += not anywhere

    def _unlink(self, holding: Holding) -> None:
        """Remove its file, now or after what the disk's thread has to do before."""
        assert self._disk is not None and self._thread is not None
        self._files.pop(holding.file, None)
        if self._closed:
            self._disk.drop(holding.file)
        else:
            self._thread.submit(self._disk.drop, holding.file)

    def _arrive_all(self) -> None:
        for holding in self._holdings:
            self._arrive(holding)

    def touch(self, holding: Holding) -> None:
        """It was used just now."""
        holding.used = next(self._clock)
