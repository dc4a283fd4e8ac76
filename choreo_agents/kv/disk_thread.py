"""The thread that does the disk, so that neither steps nor callers wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.disk import DiskTier
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import FileSkipped


class DiskThread:
    """Does what is asked of a tier, one after the other. Asked under the engine's lock, until `end`.

    Args:
        tier: Whose thread it is.
    """

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._thread = ThreadPoolExecutor(1, "choreo-disk")
        self.is_open = True

    def put(self, file: str, kv: HostKV) -> Future[list[str]]:
        """See `DiskTier.put`."""
        return self._thread.submit(self._tier.put, file, kv)

    def get(
        self, file: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], then: Callable[[], None]
    ) -> Future[HostKV | None]:
        """See `DiskTier.get`; `then` is called, on the thread, when it is done.

        Raises:
            EngineClosedError: It has ended.
        """
        if not self.is_open:
            raise EngineClosedError("the engine was closed or started again before its files were read: ask again")
        asked = self._thread.submit(self._tier.get, file, shapes)
        asked.add_done_callback(lambda _: then())
        return asked

    def drop(self, file: str) -> None:
        """Remove a file after all that was asked before; at the end all are."""
        if self.is_open:
            self._thread.submit(self._tier.drop, file)

    def skipped(self) -> Iterator[FileSkipped]:
        """Files that could not be used, each told once."""
        while self._tier.skipped:
            yield self._tier.skipped.popleft()

    def end(self) -> None:
        """Nothing more is asked."""
        self.is_open = False

    def close(self) -> None:
        """After `end`, and without the engine's lock: return when all is done, and the tier's files are gone."""
        self._thread.shutdown(wait=True)
        self._tier.close()
