"""KV of one tenant in files that outlive the engine, written in the background and found again by content.

Also helpers to read KV outside of steps: wait until it is in memory, and copy it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message, MessageIds
from choreo_agents.errors import EngineClosedError, InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey, KVStore
from choreo_agents.kv.tiers import HostKV

T = TypeVar("T")
_HELD_BYTES = 1 << 28
"""Most bytes of messages that memory must keep until they are written. It may lose others: they are computed again."""


def awaited(core: EngineCore, message: Message, entry: CacheEntry) -> Callable[[], object] | None:
    """Return a function that waits until a wanted message's KV is in memory; None if it is. Call it under the lock.

    Afterwards the KV may have moved again: call it again.
    """
    if core.cache.lost(entry):
        future, request = core.table.recompute(message, None)
        if request is not None:
            try:
                core.loop.submit([request])
            except BaseException:
                request.owner.abandon(request)  # else later callers would wait for a request that never runs
                raise
        return future.result
    if not core.cache.fetch(entry):
        return partial(wait, [] if entry.fetching is None else [entry.fetching])
    if entry.segment is not None and entry.arriving is not None and not entry.arriving.is_there:
        return entry.arriving.over.wait
    return None


def give_back(core: EngineCore, pool: KVPool, segment: Segment) -> None:
    """Return a borrowed segment after a copy, and wake the loop: requests may wait for the memory."""
    with core.lock:
        pool.give_back(segment)
        core.loop.wake()


@contextmanager
def filled(core: EngineCore, pool: KVPool, segment: Segment, kv: HostKV) -> Iterator[None]:
    """Copy KV into a borrowed segment, and return that after a block, run under the lock, that takes over its pin.

    Call it without the engine's lock: no step knows the segment yet, so steps go on meanwhile.
    """
    try:
        try:
            pool.write(segment, kv)
        except BaseException:
            with core.lock:
                pool.unpin(segment)
            raise
        with core.lock:
            yield
    finally:
        give_back(core, pool, segment)


@contextmanager
def wanted_until(
    core: EngineCore, message: Message, settled: Callable[[CacheEntry], T | Callable[[], object]]
) -> Iterator[tuple[KVPool, T]]:
    """Want a message for a block, which gets the pool and the result of `settled`; a segment is borrowed for it. Slow.

    Args:
        core: Core that has it.
        message: Message to want.
        settled: Called under the engine's lock with the message's entry; returns the result, or a function that waits.
    """
    entry: CacheEntry | None = None
    try:
        while True:
            with core.lock:
                if entry is None or message.entry is not entry:
                    entry = core.table.want(message)  # or the engine has restarted meanwhile
                result, pool = settled(entry), core.pool
                if isinstance(result, Segment):
                    pool.borrow(result)
            if not callable(result):
                break
            result()
        try:
            yield pool, result
        finally:
            if isinstance(result, Segment):
                give_back(core, pool, result)
    finally:
        with core.lock:
            if entry is not None and message.entry is entry:
                core.table.unwant(message)


def copied(core: EngineCore, message: Message, *, lost_too: bool) -> tuple[KVKey, HostKV] | None:
    """Return a copy of a message's KV in host memory. Slow.

    Steps go on meanwhile, and nothing is evicted for it unless it must be computed again.

    Args:
        core: Core that has it.
        message: Message to copy.
        lost_too: Whether lost KV is computed for that; else return None, unless a call has it computed anyway.

    Raises:
        ChoreoError: It is lost and cannot be computed now; or the engine was closed or restarted.
    """
    key: KVKey | None = None

    def here(entry: CacheEntry) -> Segment | HostKV | Callable[[], object] | None:
        nonlocal key
        if not lost_too and core.cache.lost(entry) and not _is_coming(core, entry):
            return None
        if (waiting := awaited(core, message, entry)) is not None:
            return waiting
        key = message.kv_key()
        return core.cache.host_copy(entry) if entry.segment is None else entry.segment

    with wanted_until(core, message, here) as (pool, result):
        kv = pool.read(result) if isinstance(result, Segment) else result
    return None if key is None or kv is None else (key, kv)


def _is_coming(core: EngineCore, entry: CacheEntry) -> bool:
    """Return whether a lost message is being computed anyway, for a call that reads it."""
    return any(entry in request.encoding.reads() for request in core.loop.requests_of(entry.tenant))


class WantedKV:
    """KV that is to be written, and that memory keeps until then, within bounds. Created under the engine's lock."""

    def __init__(self, core: EngineCore, message: Message) -> None:
        self._core = core
        self._message = message
        self.id = message.handle.id
        nbytes = len(message.tokens) * core.model.adapter.geometry.bytes_per_token
        self._entry: CacheEntry | None = None
        self._held_bytes = nbytes if core.held_bytes + nbytes <= _HELD_BYTES else 0
        if self._held_bytes:
            self._entry = core.table.want(message)
            core.held_bytes += self._held_bytes

    def read(self) -> tuple[KVKey, HostKV]:
        """Return a copy. Raises what `copied` does."""
        copy = copied(self._core, self._message, lost_too=True)
        assert copy is not None
        return copy

    def release(self) -> None:
        """Let memory lose it again; idempotent."""
        with self._core.lock:
            self._core.held_bytes -= self._held_bytes
            entry, self._entry, self._held_bytes = self._entry, None, 0
            if entry is not None and self._message.entry is entry:
                self._core.table.unwant(self._message)


class PersistentKV:
    """Persistence of one tenant's KV, which one thread writes in order. May be used from any thread.

    The thread is none of an executor's: it ends when nothing is left to write, since there may be many tenants; and it
    starts also after the main thread has ended, where executors accept nothing.

    Args:
        core: Core that has the KV.
        find: Returns the message of a handle; raises a `HandleError` if it is not known and leased.
        store: Store of the files; None: the tenant has no salt, and so no files.
    """

    def __init__(self, core: EngineCore, find: Callable[[MessageHandle], Message], store: KVStore | None) -> None:
        self.store = store
        self._core = core
        self._find = find
        self._lock = threading.Lock()
        """Guards the fields below. Taken within the engine's lock, never around it."""
        self._jobs: deque[tuple[Callable[[], None], Future[None]]] = deque()
        """Jobs that have not begun, in order."""
        self._last: Future[None] | None = None
        """Done when the job submitted last is: the others are done before it."""
        self._thread: threading.Thread | None = None
        """Thread that runs the jobs."""
        self._error: BaseException | None = None
        """First error since the last `flush`; an `OSError` takes precedence."""
        self._is_failing = self._closed = False

    def has(self, message_id: str) -> bool:
        """Return whether a message has a file, perhaps of another process, from which lost KV is read. Slow."""
        return self.store is not None and self.store.has(message_id)

    def require_store(self) -> KVStore:
        """Return the store of the files; raise `InvalidRequestError` if the tenant has no salt."""
        if self.store is None:
            raise InvalidRequestError(
                "persistent KV is signed with a key derived from the tenant's salt, but this tenant has none: load the "
                "engine with salt=..., a secret that is the same in every process that reads the files"
            )
        return self.store

    def persist(self, handles: Sequence[MessageHandle]) -> None:
        """Write the KV of messages that have no file yet, in the background.

        Lost KV, mapped copies, which are mapped from their sources again, and KV larger than the budget are left out.
        Memory keeps the KV until it is written, within bounds.

        Raises:
            HandleError: One is unknown or released.
            InvalidRequestError: The tenant has no salt, and there is something to persist.
            EngineClosedError: The engine, or the tenancy, was closed.
        """
        with self._core.lock:
            messages = dict.fromkeys(self._find(handle) for handle in handles)
            for message in [message for message in messages if self._is_new(message)]:
                store = self.require_store()
                wanted, begun = WantedKV(self._core, message), False
                try:
                    begun = self._submit(partial(self._write, store, wanted))
                finally:
                    if not begun:
                        wanted.release()

    def unpersist(self, message_ids: Sequence[str]) -> None:
        """Remove files, and cancel those still to be written, in the background; `flush` waits for it."""
        self._core.lock.require_own()
        if self.store is not None:
            for message_id in message_ids:
                self._submit(partial(self.store.drop, message_id))

    def require_gone(self, message_ids: Sequence[str]) -> None:
        """Raise `OSError` if a message has a file, good or not."""
        files = [message_id for message_id in message_ids if self.has(message_id)]
        if files:
            assert self.store is not None
            raise OSError(
                f"{len(files)} of {len(message_ids)} files in {str(self.store.folder)!r}, such as {files[0]!r}, cannot "
                "be removed or were written again meanwhile: check the folder, and unpersist them again"
            )

    def wait(self) -> None:
        """Wait until all earlier writes and removals were tried; `flush` raises their errors."""
        self._core.lock.require_own()
        if self.store is not None and self._core.loop.is_here:
            raise InvalidRequestError("waiting for files on the engine's own thread, which may have to read them")
        self._wait()

    def flush(self) -> None:
        """Wait until all earlier writes and removals are done.

        Raises:
            OSError: A file could not be written. ChoreoError: KV was lost before, and could not be computed again.
        """
        self.wait()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Write what is pending, waiting for it unless this is the engine's thread; accept nothing more."""
        if self._core.lock.is_the_parents:
            return  # the thread is the parent's
        with self._lock:
            self._closed = True
        if not self._core.loop.is_here:
            self._wait()

    def _wait(self) -> None:
        """Wait for the job submitted last, except on the writing thread, as in an event sink: it is behind it."""
        with self._lock:
            last = None if self._thread is threading.current_thread() else self._last
        if last is not None:
            last.result()

    def _submit(self, job: Callable[[], None]) -> bool:
        """Give a job to the writing thread; return False, with an error for `flush`, if there can be none."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("nothing can be written: the engine or the tenant was closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="choreo-write")
                try:
                    thread.start()  # it waits for the lock that we hold
                except RuntimeError as error:  # a call that only hands over what it has computed must not fail for that
                    self._note_error(error)
                    return False
                self._thread = thread
            self._last = Future()
            self._jobs.append((job, self._last))
            return True

    def _run(self) -> None:
        """Run jobs until none is left; keep their errors for `flush`, so that none stops others."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job, done = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                with self._lock:
                    self._note_error(error)
            done.set_result(None)

    def _note_error(self, error: BaseException) -> None:
        """Keep an error for `flush`. Call it with `_lock`."""
        error = error.with_traceback(None)  # a traceback would keep the KV alive
        error.__context__ = None
        if self._error is None or isinstance(error, OSError) > isinstance(self._error, OSError):
            self._error = error

    def _write(self, store: KVStore, wanted: WantedKV) -> None:
        try:
            if not store.has(wanted.id):
                store.save(*wanted.read())
                self._is_failing = False
        except OSError as error:
            was_failing, self._is_failing = self._is_failing, True
            if not was_failing:
                self._core.unwritten_file(store.folder, str(error))
            raise
        finally:
            wanted.release()

    def _is_new(self, message: Message) -> bool:
        entry, cache = message.entry, self._core.cache
        lost = entry is None or cache.lost(entry) or not (cache.in_memory(entry) or entry.on_disk)
        if message.lineage.mapper or cache.files.is_persisted(message.handle.id, message.tenant) or lost:
            return False
        nbytes = len(message.tokens) * self._core.model.adapter.geometry.bytes_per_token
        return self.store is None or nbytes <= self.store.budget_bytes


def persistent_kv_of(
    core: EngineCore, message_ids: MessageIds, find: Callable[[MessageHandle], Message]
) -> PersistentKV | None:
    """Return the persistence of a tenant's KV as the engine is configured; None if it has no folder, or keeps no KV.

    Raises:
        InvalidRequestError: The folder is another user's.
    """
    memory = core.settings.memory
    if memory.persist_dir is None or not core.method.keeps_kv:
        return None
    if not message_ids.salted:
        return PersistentKV(core, find, None)
    with core.lock:
        encoder = message_ids.encoder(core.adapters.find(None, message_ids.tenant).lora_key)
    names, geometry = (encoder, message_ids.tenant), core.model.adapter.geometry
    store = KVStore(memory.persist_dir, names, geometry, message_ids.seal, memory.persist_bytes, core.skipped_file)
    with suppress(OSError):  # reported when something is to be written
        store.make_folder()
    return PersistentKV(core, find, store)
