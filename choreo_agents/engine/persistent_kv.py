"""KV of one tenant in files that outlive the engine: written in the background, found again by what it is of.

And KV that is wanted outside of steps: what to wait for until it is in memory, and copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message, MessageIds
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey, KVStore, KVWriter
from choreo_agents.kv.store.files import LastingPlace
from choreo_agents.kv.tiers import HostKV

T = TypeVar("T")
_HELD_BYTES = 1 << 28
"""Of messages that memory must not lose before they are written, at most. Others it may: they are computed again."""


def kv_key(message: Message) -> KVKey:
    """What names a message's KV. Under the engine's lock."""
    at = message.native_offset if message.entry is None else message.entry.native_offset
    seen = zip(message.parents, message.relative_offsets, strict=True)
    parents = tuple((parent.handle.id, offset) for parent, offset in seen)
    return KVKey(message.handle.id, message.handle.model, message.tokens, parents, at)


def awaited(core: EngineCore, message: Message, entry: CacheEntry) -> Callable[[], object] | None:
    """What to wait with until a wanted message's KV is in memory; None: it is. Under the engine's lock.

    Afterwards it may be somewhere else again: ask again.
    """
    if core.cache.lost(entry):
        done, request = core.recomputer.recompute(message, None)
        if request is not None:
            try:
                core.loop.submit([request])
            except BaseException:
                request.owner.abandon(request)  # else all who ask for it next would wait for this one
                raise
        return done.result
    if not core.cache.fetch(entry):
        return partial(wait, [] if entry.fetching is None else [entry.fetching])
    if entry.segment is not None and entry.arriving is not None and not entry.arriving.is_there:
        return entry.arriving.over.wait
    return None


def give_back(core: EngineCore, pool: KVPool, segment: Segment) -> None:
    """A copy beside steps has ended: who waits for room looks again."""
    with core.lock:
        pool.give_back(segment)
        core.loop.wake()


@contextmanager
def wanted_until(
    core: EngineCore, message: Message, settled: Callable[[CacheEntry], T | Callable[[], object]]
) -> Iterator[tuple[KVPool, T]]:
    """Want a message for a block, which gets what has settled it, and that of the pool to itself. Slow.

    Args:
        core: Has it.
        message: Which.
        settled: Called under the engine's lock, with where its KV is; says what to wait with before it is asked again.
    """
    entry: CacheEntry | None = None
    try:
        while True:
            with core.lock:
                if entry is None or message.entry is not entry:
                    entry = core.table.want(message)  # or the engine has started again meanwhile
                found, pool = settled(entry), core.pool
                if isinstance(found, Segment):
                    pool.borrow(found)
            if not callable(found):
                break
            found()
        try:
            yield pool, found
        finally:
            if isinstance(found, Segment):
                give_back(core, pool, found)
    finally:
        with core.lock:
            if entry is not None and message.entry is entry:
                core.table.unwant(message)


def copied(core: EngineCore, message: Message, *, lost_too: bool) -> tuple[KVKey, HostKV] | None:
    """A copy of a message's KV, as it is kept below the pool. Slow.

    Steps go on meanwhile, and nothing has to leave the pool for it unless it is computed again.

    Args:
        core: Has it.
        message: Of which.
        lost_too: Whether what is lost is computed for that; else there is None, unless some call has it computed.

    Raises:
        ChoreoError: It is lost, and cannot be computed again now; or the engine was closed or started again.
    """
    key: KVKey | None = None

    def here(entry: CacheEntry) -> Segment | HostKV | Callable[[], object] | None:
        nonlocal key
        if not lost_too and core.cache.lost(entry) and not _is_coming(core, entry):
            return None
        if (waiting := awaited(core, message, entry)) is not None:
            return waiting
        key = kv_key(message)
        return core.cache.below(entry) if entry.segment is None else entry.segment

    with wanted_until(core, message, here) as (pool, found):
        kv = pool.read(found) if isinstance(found, Segment) else found
    return None if key is None or kv is None else (key, kv)


def _is_coming(core: EngineCore, entry: CacheEntry) -> bool:
    """Whether a lost message is computed in any case, for a call that reads it."""
    return any(entry in request.encoding.reads() for request in core.loop.requests_of(entry.tenant))


class WantedKV:
    """A message's KV that memory keeps until it is written: see `Unwritten`. Made under the engine's lock."""

    def __init__(self, core: EngineCore, message: Message) -> None:
        self._core = core
        self._message = message
        self.id = message.handle.id
        self.nbytes = len(message.tokens) * core.model.adapter.geometry.bytes_per_token
        self._entry: CacheEntry | None = None
        self._held_bytes = self.nbytes if core.held_bytes + self.nbytes <= _HELD_BYTES else 0
        if self._held_bytes:
            self._entry = core.table.want(message)
            core.held_bytes += self._held_bytes

    def read(self) -> tuple[KVKey, HostKV]:
        """A copy. Raises what `copied` does."""
        found = copied(self._core, self._message, lost_too=True)
        assert found is not None
        return found

    def release(self) -> None:
        """Memory may lose it."""
        with self._core.lock:
            self._core.held_bytes -= self._held_bytes
            if self._entry is not None and self._message.entry is self._entry:
                self._core.table.unwant(self._message)


class PersistentKV:
    """May be used from any thread. Slow, but for `knows` and `keep`.

    Args:
        core: Has the KV, and reads it again.
        find: The message of a handle; raises a `HandleError` if it is not known and leased.
        store: Gets the files; None: the tenant has no salt, and so no file.
    """

    def __init__(self, core: EngineCore, find: Callable[[MessageHandle], Message], store: KVStore | None) -> None:
        self.store = store
        self._core = core
        self._find = find
        self._writer = None if store is None else KVWriter(store, core.unwritten_file)

    def knows(self, message_id: str) -> bool:
        """Whether a message has a file, as far as is known without looking."""
        return self.store is not None and self.store.knows(message_id)

    def has(self, message_id: str) -> bool:
        """Whether a message has a file, perhaps of another process: it is read from there if memory has lost it."""
        return self.store is not None and self.store.has(message_id)

    def persist(self, handles: Sequence[MessageHandle], *, lost_too: bool = False) -> None:
        """Have the KV of messages written that have no file yet; does not wait for it.

        Mapped copies are made of their sources again, and what is larger than the budget is left out. Until it is
        written memory does not lose it, within bounds.

        Args:
            handles: Of the messages.
            lost_too: Whether what has no KV is computed for that; else it is left out.

        Raises:
            HandleError: One is unknown or released.
            InvalidRequestError: The tenant has no salt, and there is something to be kept.
            EngineClosedError: The engine, or the tenancy, was closed.
        """
        core = self._core
        with core.lock:
            found = dict.fromkeys(self._find(handle) for handle in handles)
            new = [message for message in found if self._is_new(message, lost_too=lost_too)]
            if new and self._writer is None:
                raise InvalidRequestError(WITHOUT_SALT)
            wanted: list[WantedKV] = []
            with ExitStack() as undone:
                for message in new:
                    wanted.append(WantedKV(core, message))
                    undone.callback(wanted[-1].release)
                undone.pop_all()
        if self._writer is not None:
            self._writer.write(wanted)

    def unpersist(self, message_ids: Sequence[str]) -> None:
        """Have files removed, and those that are still to be written; does not wait for it, as `flush` does."""
        if self._writer is not None:
            self._writer.drop(message_ids)

    def require_gone(self, message_ids: Sequence[str]) -> None:
        """Raise `OSError` if a message has a file, good or not."""
        left = [message_id for message_id in message_ids if self.has(message_id)]
        if left:
            assert self.store is not None
            raise OSError(
                f"{len(left)} of {len(message_ids)} files in {str(self.store.folder)!r} cannot be removed, or were "
                f"kept again meanwhile, such as {left[0]!r}: see to the folder, and discard them again"
            )

    def wait(self) -> None:
        """Return when all that was asked before was tried: `flush` tells what failed."""
        if self._writer is not None:
            if self._core.loop.is_here:
                raise InvalidRequestError(
                    "files are waited for on the engine's own thread, which may have to read them"
                )
            self._writer.wait()

    def flush(self) -> None:
        """Return when all that was asked before is written.

        Raises:
            OSError: Something could not be. ChoreoError: It was lost before, and could not be computed again.
        """
        self.wait()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is to be written, if this is not the engine's thread, and be asked nothing more."""
        if self._writer is not None:
            self._writer.close(wait=not self._core.loop.is_here)

    def _is_new(self, message: Message, *, lost_too: bool) -> bool:
        entry, cache = message.entry, self._core.cache
        lost = entry is None or cache.lost(entry) or not (cache.in_memory(entry) or entry.on_disk)
        if message.lineage.mapper or self.knows(message.handle.id) or (lost and not lost_too):
            return False
        nbytes = len(message.tokens) * self._core.model.adapter.geometry.bytes_per_token
        return self.store is None or nbytes <= self.store.budget_bytes


WITHOUT_SALT = (
    "KV that outlives its engine is sealed with a key made of the tenant's salt, and this one has none: "
    "load the engine with salt=..., a secret of yours, the same in every process that is to read the files"
)


def lasting_store(
    core: EngineCore, message_ids: MessageIds, folder: Path, budget_bytes: int, skipped: Callable[[Path, str], None]
) -> tuple[KVStore, LastingPlace]:
    """A tenant's store of this model in a folder that outlives the engine, and its place, perhaps still to be made."""
    with core.lock:
        encoder = message_ids.encoder(core.adapters.find(None, message_ids.tenant).lora_key)
    place = LastingPlace(folder, encoder, message_ids.tenant)
    return KVStore(place, core.model.adapter.geometry, message_ids.seal, budget_bytes, skipped), place


def persistent_kv_of(
    core: EngineCore, message_ids: MessageIds, find: Callable[[MessageHandle], Message]
) -> PersistentKV | None:
    """What keeps a tenant's KV where the engine was told to; None: it was told nothing, or keeps none.

    Raises:
        InvalidRequestError: The folder is another user's.
    """
    memory = core.settings.memory
    if memory.persist_dir is None or not core.method.keeps_kv:
        return None
    if not message_ids.salted:
        return PersistentKV(core, find, None)
    store, place = lasting_store(core, message_ids, memory.persist_dir, memory.persist_bytes, core.skipped_file)
    with suppress(OSError):  # told when something is to be kept
        place.make()
    return PersistentKV(core, find, store)
