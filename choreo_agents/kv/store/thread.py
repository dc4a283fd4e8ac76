"""The thread that does the disk, so that neither steps nor callers wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.store.key import FileKey
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.tiers import HostKV


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
