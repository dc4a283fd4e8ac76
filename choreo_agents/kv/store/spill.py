"""One unnamed file for the KV of an engine that fits neither the pool nor the host."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from choreo_agents.kv.blocks import BlockAllocator, Run
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.tiers import HostKV


class SpillFile:
    """File without a name: other users cannot open it, and the system removes it with this process, however that ends.

    Space, in tokens, is taken and freed under the engine's lock; one thread writes and reads. What is read is compared
    with a digest of what was written, which stays in memory.

    Args:
        folder: Directory whose disk is used; who else may write there is not checked.
        geometry: Shape of the model's KV.
        budget_bytes: Most bytes of the file.
        skipped: Called with the folder whenever KV cannot be read, and why.
    """

    def __init__(
        self, folder: Path, geometry: KVGeometry, budget_bytes: int, skipped: Callable[[Path, str], None]
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.space = BlockAllocator(budget_bytes // geometry.bytes_per_token)
        """Free space; a block is a token."""
        self.file = TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  closed with the engine
        self._folder, self._geometry, self._skipped = folder, geometry, skipped

    def write(self, runs: Sequence[Run], kv: HostKV) -> bytes:
        """Write KV to runs of its length, and return its digest. Raises `OSError` if it cannot be written."""
        data = _bytes_of(torch.stack([kv.keys, kv.values]))
        self._move(runs, data, self.file.write)
        return _digest(data)

    def read(self, runs: Sequence[Run], digest: bytes, native_offset: int) -> tuple[HostKV, int] | None:
        """Return the KV that was written to runs, with the position at which it was encoded; None if it cannot be read,
        or is not what was written."""
        layers, heads, dim = self._geometry.layers, self._geometry.kv_heads, self._geometry.head_dim
        tokens = sum(run.length for run in runs)
        both = torch.empty(2, layers, heads, tokens, dim, dtype=self._geometry.dtype)
        data = _bytes_of(both)
        try:
            self._move(runs, data, self.file.readinto)
        except OSError as error:
            self._skipped(self._folder, f"cannot be read: {error.strerror}")
            return None
        if _digest(data) == digest:
            return HostKV(both[0], both[1]), native_offset
        self._skipped(self._folder, "was changed")
        return None

    def _move(self, runs: Sequence[Run], data: memoryview, move: Callable[[memoryview], int]) -> None:
        """Write data to runs of the file, or read it from there."""
        size, at = self._geometry.bytes_per_token, 0
        for run in runs:
            self.file.seek(run.start * size)
            end = at + run.length * size
            while at < end:
                if not (count := move(data[at:end])):
                    raise OSError(errno.EIO, "it ends early")
                at += count


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(torch.uint8).numpy()
    return memoryview(flat).cast("B")


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
