"""KV that is wanted outside of steps: what to wait for until it is in memory, and copies of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from functools import partial

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store import KVKey
from choreo_agents.kv.tiers import HostKV

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
            core.loop.submit([request])
        return done.result
    if not core.cache.fetch(entry):
        return partial(wait, [] if entry.fetching is None else [entry.fetching])
    if entry.segment is not None and entry.arriving is not None and not entry.arriving.is_there:
        return entry.arriving.over.wait
    return None


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
        """A copy. Steps go on meanwhile, and nothing has to leave the pool for it unless it is computed again.

        Raises:
            ChoreoError: It is lost, and cannot be computed again now.
        """
        core, message = self._core, self._message
        while True:
            with core.lock:
                if self._entry is None or message.entry is not self._entry:
                    self._entry = core.table.want(message)  # the engine has started again meanwhile
                waiting, pool = awaited(core, message, self._entry), core.pool
                if waiting is None:
                    key, segment, kv = kv_key(message), self._entry.segment, core.cache.below(self._entry)
                    if segment is None:
                        assert kv is not None
                        return key, kv
                    pool.pin(segment)
                    break
            waiting()
        try:
            return key, pool.read(segment)
        finally:
            with core.lock:
                pool.unpin(segment)

    def release(self) -> None:
        """Memory may lose it."""
        with self._core.lock:
            self._core.held_bytes -= self._held_bytes
            if self._entry is not None and self._message.entry is self._entry:
                self._core.table.unwant(self._message)
