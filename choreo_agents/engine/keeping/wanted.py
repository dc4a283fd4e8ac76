"""KV that is wanted outside of steps: what to wait for until it is in memory, and copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey
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
