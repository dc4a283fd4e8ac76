"""Writes what was encoded to an archive, on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock

from choreo_agents.engine import Engine
from choreo_agents.errors import ChoreoError
from choreo_agents.kv.archive import Archive
from choreo_agents.kv.handle import MessageHandle


class ArchiveWriter:
    """May be used from any thread.

    Args:
        engine: Has the KV.
        archive: Gets it.
    """

    def __init__(self, engine: Engine, archive: Archive) -> None:
        self._engine = engine
        self._archive = archive
        self._thread = ThreadPoolExecutor(1, "choreo-library-write")
        self._lock = Lock()
        self._under_way: list[Future[None]] = []

    def write(self, handles: Sequence[MessageHandle]) -> None:
        """Have messages written that have no file yet; they are leased until then."""
        new = [handle for handle in handles if not self._archive.has(handle.id)]
        if not new:
            return
        leases = self._engine.kv.lease(new, scoped=False)

        def work() -> None:
            try:
                # If the engine is closed meanwhile, or has no room to bring it back, it is written another time.
                with suppress(ChoreoError):
                    for handle in new:
                        self._archive.save(self._engine.kv.key(handle), self._engine.kv.read(handle))
            finally:
                leases.release()

        with self._lock:
            # What failed stays, for `flush` to tell.
            self._under_way = [each for each in self._under_way if not each.done() or each.exception() is not None]
            self._under_way.append(self._thread.submit(work))

    def wait(self) -> None:
        """Wait until everything was tried; `flush` tells what failed."""
        with self._lock:
            pending = list(self._under_way)
        wait(pending)

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: Something could not be.
        """
        self.wait()
        with self._lock:
            waited, self._under_way = self._under_way, []
        errors = [error for error in (each.exception() for each in waited) if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._thread.shutdown(wait=True)
