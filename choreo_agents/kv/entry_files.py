"""Files of messages' KV, in the engine's own store or in one that outlives it.

One thread does all reading and writing, so that neither steps nor callers wait for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store.key import FileKey
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import EventSink, FileSkipped, PerTenantCounters

_UNWRITTEN_BYTES = 1 << 28
"""Bytes of KV that wait to be written before eviction waits for the disk."""


class DiskThread:
    """A thread that reads and writes files in order. Jobs are submitted under the engine's lock, until `end`.

    Args:
        make_store: Makes the store for KV that leaves the host; it is closed with the thread. Its argument is to be
            called with the id of each message whose file is removed. None: only files of other stores are read.
    """

    def __init__(self, make_store: Callable[[Callable[[str], None]], KVStore] | None) -> None:
        self._removed: list[str] = []
        self.store = None if make_store is None else make_store(self._removed.append)
        self._thread = ThreadPoolExecutor(1, "choreo-disk")
        self.is_open = True

    def put(self, key: FileKey, kv: HostKV) -> Future[list[str]]:
        """Write a file; the future gives the ids that have none now: removed for space, or this one if not written."""
        assert self.store is not None
        return self._thread.submit(self._put, self.store, key, kv)

    def get(self, store: KVStore, key: FileKey, then: Callable[[], None]) -> Future[tuple[HostKV, int] | None]:
        """Read a file by `KVStore.load`; `then` is called on the thread when that is done.

        Raises:
            EngineClosedError: `end` was called.
        """
        if not self.is_open:
            raise EngineClosedError("the engine was closed or restarted before its files were read: call again")
        future = self._thread.submit(store.load, key)
        future.add_done_callback(lambda _: then())
        return future

    def drop(self, message_id: str) -> None:
        """Remove a file, after the jobs before; once ended, all files are removed anyway."""
        if self.is_open and self.store is not None:
            self._thread.submit(self.store.drop, message_id)

    def end(self) -> None:
        """Refuse further jobs."""
        self.is_open = False

    def close(self) -> None:
        """Wait for all jobs and remove the store's files. Call it after `end`, without the engine's lock."""
        self._thread.shutdown(wait=True)
        if self.store is not None:
            self.store.close()

    def _put(self, store: KVStore, key: FileKey, kv: HostKV) -> list[str]:
        self._removed.clear()
        written = store.save(key, kv)
        return [*self._removed] if written else [*self._removed, key.id]


class EntryFiles:
    """Entries that have files, and those being written or read. Used under the engine's lock only.

    Args:
        disk: Reads and writes files; None: no message has a file.
        persistent: By tenant, the store of KV that outlives the engine.
        tier_counters: Counts entries that are lost.
        skipped: Queue of files that could not be used.
        sink: Gets an event for each of them.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Called on the disk's thread when a read is done."""

    def __init__(
        self,
        disk: DiskThread | None,
        persistent: Mapping[str, KVStore],
        tier_counters: PerTenantCounters[TierCounters],
        skipped: deque[FileSkipped],
        sink: EventSink,
    ) -> None:
        self._disk = disk
        self._persistent = persistent
        self._tier_counters = tier_counters
        self._skipped, self._emit = skipped, sink
        self._files: dict[str, CacheEntry] = {}
        """Entries that have a file in the engine's own store, or are being written, by message id."""
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
        if self.find(entry):
            return
        if self._disk is None or self._disk.store is None or not self._disk.is_open:
            self._tier_counters.add(entry.tenant, "lost")
            return
        entry.staged = kv
        entry.writing = self._disk.put(entry.file, kv)
        self._files[entry.key], self._writing[entry] = entry, kv.nbytes
        if sum(self._writing.values()) > _UNWRITTEN_BYTES:
            # The disk is slower than what leaves for it: wait, rather than fill the host.
            for slow in list(self._writing):
                self.arrive(slow, wait=True)

    def fetch(self, entry: CacheEntry) -> None:
        """Begin to read the file of an entry that is in no memory."""
        if entry.fetching is not None or self._disk is None:
            return
        store = self._disk.store if entry.on_disk else self._persistent.get(entry.tenant)
        if store is not None:
            entry.fetching = self._disk.get(store, entry.file, self.wake)
            self._fetching[entry] = None
        elif not entry.on_disk:
            self._note_missing(entry)

    def drop(self, entry: CacheEntry) -> None:
        """Forget an entry and remove its file; one that outlives the engine stays."""
        if self._disk is not None and (entry.on_disk or entry.writing is not None):
            self._files.pop(entry.key, None)
            self._disk.drop(entry.key)
        self._writing.pop(entry, None)
        self._fetching.pop(entry, None)
        entry.writing = entry.fetching = None
        entry.on_disk = entry.persisted = False

    def arrive_all(self) -> None:
        """Process all finished reads and writes."""
        for entry in (*self._writing, *self._fetching):
            self.arrive(entry)

    def arrive(self, entry: CacheEntry, *, wait: bool = False) -> None:
        """Process the finished read or write of an entry."""
        if entry.writing is not None and (wait or entry.writing.done()):
            removed = [entry.key] if entry.writing.exception() is not None else entry.writing.result()
            entry.writing = None
            self._writing.pop(entry, None)
            entry.on_disk = True
            for message_id in removed:
                self._note_removed(message_id)
            if not entry.wanted or entry.segment is not None:
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
            self._note_removed(entry.key)
            entry.on_disk = False
        elif entry.persisted:
            entry.persisted = False  # even if the store lists it: else waiting requests would try it forever
            self._tier_counters.add(entry.tenant, "lost", entry.segment is None)

    def _note_removed(self, message_id: str) -> None:
        """Note that a message's file was removed; count the message as lost if nothing else has it."""
        entry = self._files.get(message_id)
        if entry is None:
            return
        # It was written before it was removed.
        self.arrive(entry)
        if entry.writing is not None:
            return  # written again meanwhile
        if self._files.pop(message_id, None) is None or not entry.on_disk:
            return
        entry.on_disk = False
        is_available = entry.segment is not None or (entry.staged is not None and entry.wanted)
        self._tier_counters.add(entry.tenant, "lost", not is_available and not self.find(entry))
