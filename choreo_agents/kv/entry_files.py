"""Which messages have files: in the engine's own store, or in one that outlives it.

One thread does the disk, so that neither steps nor callers wait for it.
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
"""On their way to the disk at once, about."""


class DiskThread:
    """Does what is asked of stores, one after the other. Asked under the engine's lock, until `end`.

    Args:
        make_store: Makes the store that takes what leaves the host, and is closed with the thread, told what it is to
            call with messages whose files it removes; None: files of other stores are read, and none is written.
    """

    def __init__(self, make_store: Callable[[Callable[[str], None]], KVStore] | None) -> None:
        self._removed: list[str] = []
        self.store = None if make_store is None else make_store(self._removed.append)
        self._thread = ThreadPoolExecutor(1, "choreo-disk")
        self.is_open = True

    def put(self, key: FileKey, kv: HostKV) -> Future[list[str]]:
        """Write a file; the messages that have none any more: removed to make room, or this one if there is none."""
        assert self.store is not None
        return self._thread.submit(self._put, self.store, key, kv)

    def get(self, store: KVStore, key: FileKey, then: Callable[[], None]) -> Future[tuple[HostKV, int] | None]:
        """See `KVStore.load`; `then` is called, on the thread, when it is done.

        Raises:
            EngineClosedError: It has ended.
        """
        if not self.is_open:
            raise EngineClosedError("the engine was closed or started again before its files were read: ask again")
        asked = self._thread.submit(store.load, key)
        asked.add_done_callback(lambda _: then())
        return asked

    def drop(self, message_id: str) -> None:
        """Remove a file after all that was asked before; at the end all are."""
        if self.is_open and self.store is not None:
            self._thread.submit(self.store.drop, message_id)

    def end(self) -> None:
        """Nothing more is asked."""
        self.is_open = False

    def close(self) -> None:
        """After `end`, and without the engine's lock: return when all is done, and the store's files are gone."""
        self._thread.shutdown(wait=True)
        if self.store is not None:
            self.store.close()

    def _put(self, store: KVStore, key: FileKey, kv: HostKV) -> list[str]:
        self._removed.clear()
        written = store.save(key, kv)
        return [*self._removed] if written else [*self._removed, key.id]


class EntryFiles:
    """What has left the host, and comes back by the disk's thread. Used under the engine's lock only.

    Args:
        disk: Reads and writes; None: nothing has a file.
        kept: By tenant, the store of what outlives the engine.
        movements: What is lost is counted in.
        skipped: Files that could not be used, which it tells of.
        sink: Is told of them.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Called from the disk's thread when something that was asked of it is done."""

    def __init__(
        self,
        disk: DiskThread | None,
        kept: Mapping[str, KVStore],
        tier_counters: PerTenantCounters[TierCounters],
        skipped: deque[FileSkipped],
        sink: EventSink,
    ) -> None:
        self._disk = disk
        self._kept = kept
        self._tier_counters = tier_counters
        self._skipped, self._emit = skipped, sink
        self._files: dict[str, CacheEntry] = {}
        """Who has a file in the engine's own store, or one under way, by message."""
        self._writing: dict[CacheEntry, int] = {}
        """What is under way to the disk, and the bytes that it takes on the host meanwhile."""
        self._fetching: dict[CacheEntry, None] = {}

    def is_kept(self, message_id: str, tenant: str) -> bool:
        """Whether a message has a file that outlives the engine, as far as is known."""
        store = self._kept.get(tenant)
        return store is not None and store.knows(message_id)

    def find(self, entry: CacheEntry) -> bool:
        """Whether what is in no memory has a file that outlives the engine; it comes from there then."""
        entry.kept = self.is_kept(entry.key, entry.tenant)
        return entry.kept

    def has(self, entry: CacheEntry) -> bool:
        """Whether a file has what is about to leave memory. One that outlives the engine may be gone since it was read:
        discarded, or removed to make room."""
        if entry.kept:
            self.find(entry)
        return entry.filed

    def put(self, entry: CacheEntry, kv: HostKV) -> None:
        """Have it written, unless it has a file; until it is there the kv stays on the host."""
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
        """Begin to read what has a file and is in no memory."""
        if entry.fetching is not None or self._disk is None:
            return
        store = self._disk.store if entry.on_disk else self._kept.get(entry.tenant)
        if store is not None:
            entry.fetching = self._disk.get(store, entry.file, self.wake)
            self._fetching[entry] = None
        elif not entry.on_disk:
            self._no_file(entry)

    def drop(self, entry: CacheEntry) -> None:
        """It is forgotten; a file that outlives the engine stays."""
        if self._disk is not None and (entry.on_disk or entry.writing is not None):
            self._files.pop(entry.key, None)
            self._disk.drop(entry.key)
        self._writing.pop(entry, None)
        self._fetching.pop(entry, None)
        entry.writing = entry.fetching = None
        entry.on_disk = entry.kept = False

    def arrive_all(self) -> None:
        """Take note of all that the disk's thread has done."""
        for entry in (*self._writing, *self._fetching):
            self.arrive(entry)

    def arrive(self, entry: CacheEntry, *, wait: bool = False) -> None:
        """Take note of what the disk's thread has done for it."""
        if entry.writing is not None and (wait or entry.writing.done()):
            removed = [entry.key] if entry.writing.exception() is not None else entry.writing.result()
            entry.writing = None
            self._writing.pop(entry, None)
            entry.on_disk = True
            for message_id in removed:
                self._removed(message_id)
            if not entry.wanted or entry.segment is not None:
                entry.staged = None
        if entry.fetching is not None and entry.fetching.done():
            found = None if entry.fetching.exception() is not None else entry.fetching.result()
            entry.fetching = None
            self._fetching.pop(entry, None)
            while self._skipped:
                self._emit(self._skipped.popleft())
            if found is None:
                self._no_file(entry)
            elif entry.wanted and entry.segment is None and entry.staged is None:
                entry.staged, entry.native_offset = found

    def _no_file(self, entry: CacheEntry) -> None:
        """There was no good one."""
        if entry.on_disk:
            self._removed(entry.key)
            entry.on_disk = False
        elif entry.kept:
            entry.kept = False  # whatever the store knows: what waits for it is not to ask again and again
            self._tier_counters.add(entry.tenant, "lost", entry.segment is None)

    def _removed(self, message_id: str) -> None:
        """A file is not there any more; whose it was may be lost."""
        entry = self._files.get(message_id)
        if entry is None:
            return
        # It was written before it was removed.
        self.arrive(entry)
        if entry.writing is not None:
            return  # once more, meanwhile
        if self._files.pop(message_id, None) is None or not entry.on_disk:
            return
        entry.on_disk = False
        anywhere = entry.segment is not None or (entry.staged is not None and entry.wanted)
        self._tier_counters.add(entry.tenant, "lost", not anywhere and not self.find(entry))
