"""Files of messages' KV: the engine's spill file, or one for each message in a store that outlives the engine.

One thread does all reading and writing, so that neither steps nor callers wait for the disk.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import EventSink, FileSkipped, PerTenantCounters

T = TypeVar("T")
_UNWRITTEN_BYTES = 1 << 28
"""Bytes of KV that wait to be written before eviction waits for the disk."""


class DiskThread:
    """A thread that reads and writes files in order. Jobs are submitted under the engine's lock, until `end`.

    Args:
        spill: File for KV that leaves the host; it is closed with the thread. None: only files of stores are read.
    """

    def __init__(self, spill: SpillFile | None) -> None:
        self.spill = spill
        self._thread = ThreadPoolExecutor(1, "choreo-disk")
        self.is_open = True

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Run a job after those before it.

        Raises:
            EngineClosedError: `end` was called.
        """
        if not self.is_open:
            raise EngineClosedError("the engine was closed or restarted before its files were read: call again")
        return self._thread.submit(job, *args)

    def end(self) -> None:
        """Refuse further jobs."""
        self.is_open = False

    def close(self) -> None:
        """Wait for all jobs and end the spill file. Call it after `end`, without the engine's lock."""
        self._thread.shutdown(wait=True)
        if self.spill is not None:
            self.spill.file.close()


class EntryFiles:
    """Entries that have files, and those being written or read. Used under the engine's lock only.

    Args:
        disk: Reads and writes files.
        persistent: By tenant, the store of KV that outlives the engine.
        tier_counters: Counts entries that are lost.
        skipped: Queue of files that could not be used.
        sink: Gets an event for each of them.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Called on the disk's thread when a read is done."""

    def __init__(
        self,
        disk: DiskThread,
        persistent: Mapping[str, KVStore],
        tier_counters: PerTenantCounters[TierCounters],
        skipped: deque[FileSkipped],
        sink: EventSink,
    ) -> None:
        self._disk = disk
        self._persistent = persistent
        self._tier_counters = tier_counters
        self._skipped, self._emit = skipped, sink
        self._spilled: OrderedDict[CacheEntry, tuple[tuple[Run, ...], Future[bytes]]] = OrderedDict()
        """Runs of the spill file by entry, least recently used first, and the write that returns their digest."""
        self._writing: dict[CacheEntry, int] = {}
        """Entries that are being written, and the bytes that they take on the host meanwhile."""
        self._fetching: dict[CacheEntry, None] = {}

    def is_persisted(self, message_id: str, tenant: str) -> bool:
        """Return whether a message has a file that outlives the engine, as far as is known without looking."""
        store = self._persistent.get(tenant)
        return store is not None and store.knows(message_id)

    def find(self, entry: CacheEntry) -> bool:
        """Set and return `entry.persisted`: whether a file that outlives the engine has it."""
        entry.persisted = self.is_persisted(entry.key, entry.tenant)
        return entry.persisted

    def has(self, entry: CacheEntry) -> bool:
        """Return whether a file has an entry that is about to leave memory.

        A file that outlives the engine may be gone since it was read: unpersisted, or removed for space.
        """
        if entry.persisted:
            self.find(entry)
        return entry.has_file

    def put(self, entry: CacheEntry, kv: HostKV) -> None:
        """Write an entry, unless it has a file; its KV stays on the host until that is done."""
        assert entry not in self._spilled
        if self.find(entry):
            return
        spill = self._disk.spill if self._disk.is_open else None
        runs = None if spill is None else self._take_space(spill, entry.tokens)
        if spill is None or runs is None:
            self._tier_counters.add(entry.tenant, "lost")
            return
        try:
            entry.writing = self._disk.submit(spill.write, runs, kv)
        except BaseException:  # no thread can be started
            for run in runs:
                spill.space.free(run)
            raise
        entry.staged = kv
        self._spilled[entry], self._writing[entry] = (runs, entry.writing), kv.nbytes
        if sum(self._writing.values()) > _UNWRITTEN_BYTES:
            # The disk is slower than what leaves for it: wait, rather than fill the host.
            for slow in list(self._writing):
                self.arrive(slow, wait=True)

    def fetch(self, entry: CacheEntry) -> None:
        """Begin to read the file of an entry that is in no memory."""
        if entry.fetching is not None:
            return
        if self._disk.spill is not None and entry in self._spilled:
            self._spilled.move_to_end(entry)
            runs, written = self._spilled[entry]
            entry.fetching = self._disk.submit(self._disk.spill.read, runs, written.result(), entry.native_offset)
        elif (store := self._persistent.get(entry.tenant)) is not None:
            entry.fetching = self._disk.submit(store.load, entry.key, entry.tokens)
        else:
            self._note_missing(entry)
            return
        self._fetching[entry] = None
        wake = self.wake
        entry.fetching.add_done_callback(lambda _: wake())

    def drop(self, entry: CacheEntry) -> None:
        """Forget an entry and free its space; a file that outlives the engine stays."""
        self._free_space(entry)
        self._fetching.pop(entry, None)
        entry.fetching = None
        entry.persisted = False

    def arrive_all(self) -> None:
        """Process all finished reads and writes."""
        for entry in (*self._writing, *self._fetching):
            self.arrive(entry)

    def arrive(self, entry: CacheEntry, *, wait: bool = False) -> None:
        """Process the finished read or write of an entry."""
        if entry.writing is not None and (wait or entry.writing.done()):
            failed = entry.writing.exception() is not None
            entry.writing = None
            self._writing.pop(entry, None)
            entry.on_disk = True
            if failed:
                self._lose(entry)
            elif not entry.wanted or entry.segment is not None:
                entry.staged = None
        if entry.fetching is not None and entry.fetching.done():
            loaded = None if entry.fetching.exception() is not None else entry.fetching.result()
            entry.fetching = None
            self._fetching.pop(entry, None)
            while self._skipped:
                self._emit(self._skipped.popleft())
            if loaded is None:
                self._note_missing(entry)
            elif entry.wanted and entry.segment is None and entry.staged is None:
                entry.staged, entry.native_offset = loaded

    def _note_missing(self, entry: CacheEntry) -> None:
        """Note that an entry's file is missing or unusable."""
        if entry.on_disk:
            self._lose(entry)
        elif entry.persisted:
            entry.persisted = False  # even if the store lists it: else waiting requests would try it forever
            self._tier_counters.add(entry.tenant, "lost", entry.segment is None)

    def _take_space(self, spill: SpillFile, tokens: int) -> tuple[Run, ...] | None:
        """Take space in the spill file, from the least recently used entries if need be; None: there is not enough.

        What is being read keeps its space.
        """
        space = spill.space
        for entry in () if space.free_blocks >= tokens else [*self._fetching]:
            self.arrive(entry)
        if tokens > space.blocks - sum(entry.tokens for entry in self._fetching if entry in self._spilled):
            return None
        while space.free_blocks < tokens:
            old = next(entry for entry in self._spilled if entry not in self._fetching)
            self.arrive(old)
            if old.writing is not None and not old.writing.cancel():
                wait([old.writing])  # else the host would fill with what waits to be written
            if old in self._spilled:  # else it could not be read
                self._lose(old)
        return space.allocate(tokens)

    def _free_space(self, entry: CacheEntry) -> None:
        # Jobs run in order: a read or write that is under way is over before anything else is written there.
        if self._disk.spill is not None and entry in self._spilled:
            for run in self._spilled.pop(entry)[0]:
                self._disk.spill.space.free(run)
        self._writing.pop(entry, None)
        entry.writing, entry.on_disk = None, False

    def _lose(self, entry: CacheEntry) -> None:
        """Give up the space of an entry; count it as lost if nothing else has it."""
        self._free_space(entry)
        if not entry.wanted or entry.segment is not None:
            entry.staged = None
        is_available = entry.segment is not None or entry.staged is not None
        self._tier_counters.add(entry.tenant, "lost", not is_available and not self.find(entry))
