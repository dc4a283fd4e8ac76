"""Where keys and values wait outside of the pool: in host memory, and in a folder of safetensors."""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
_ABANDONED_S = 3600.0
"""Age of a half-written file that nobody is writing any more."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class HostTier(Generic[Key]):
    """Parcels in host memory, the least recently used ones leaving when a budget is reached.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._parcels: OrderedDict[Key, Parcel] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._parcels

    def put(self, key: Key, parcel: Parcel) -> list[tuple[Key, Parcel]]:
        """Keep a parcel; what leaves for it, oldest first: itself if it is larger than the budget."""
        assert key not in self._parcels
        self._parcels[key] = parcel
        self.used_bytes += parcel.nbytes
        left: list[tuple[Key, Parcel]] = []
        while self.used_bytes > self.budget_bytes:
            oldest, leaving = self._parcels.popitem(last=False)
            self.used_bytes -= leaving.nbytes
            left.append((oldest, leaving))
        return left

    def take(self, key: Key) -> Parcel | None:
        """Hand a parcel out and forget it."""
        parcel = self._parcels.pop(key, None)
        if parcel is not None:
            self.used_bytes -= parcel.nbytes
        return parcel

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert self.used_bytes == sum(parcel.nbytes for parcel in self._parcels.values()) <= self.budget_bytes


class DiskTier:
    """Parcels in a folder: one safetensors file for each message, below a folder for each model.

    Files are written whole or not at all, and named by content: processes may share the folder. A file that is
    missing, damaged (it carries a checksum) or another's counts as lost. Slow: call it from a thread of its own, one
    call at a time.

    Args:
        folder: The user's; made if need be.
        budget_bytes: Of all files of this model; the longest unused ones are removed.
        model: Fingerprint of model and adapter.
    """

    def __init__(self, folder: Path, budget_bytes: int, model: str) -> None:
        self.folder = folder / model
        self.budget_bytes = budget_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def put(self, key: str, parcel: Parcel) -> list[str]:
        """Write a parcel under a key that says all that it depends on, its position too.

        Returns:
            The keys of what is not there any more: removed to make room, or this one if it alone is over the budget.
        """
        if parcel.nbytes > self.budget_bytes:
            return [key]
        path = self._path(key)
        if not path.exists():
            partial = path.with_suffix(f".{uuid4().hex}.partial")
            about = {"message": key, "checksum": _checksum(parcel)}
            try:
                save_file({"keys": parcel.keys, "values": parcel.values}, partial, metadata=about)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        removed = self._make_room(keep=path)
        return removed if path.exists() else [*removed, key]

    def get(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel | None:
        """Read a parcel; None unless the file holds this message's keys and values in this shape."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                parcel = Parcel(file.get_tensor("keys"), file.get_tensor("values"))
        except (OSError, SafetensorError):
            self.drop(key)
            return None
        fits = {parcel.keys.shape, parcel.values.shape} == {shape} and parcel.keys.dtype == parcel.values.dtype == dtype
        if not fits or about != {"message": key, "checksum": _checksum(parcel)}:
            self.drop(key)
            return None
        with suppress(OSError):
            os.utime(path)
        return parcel

    def drop(self, key: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _make_room(self, keep: Path) -> list[str]:
        files = self._files()
        used = sum(size for _, size, _ in files)
        removed: list[str] = []
        for _, size, path in sorted(files):
            if used <= self.budget_bytes:
                break
            if path != keep:
                with suppress(OSError):
                    path.unlink()
                removed.append(path.stem)
                used -= size
        return removed

    def _sweep(self) -> None:
        """Remove what a process that was killed has left half-written."""
        for path in self.folder.glob("*.partial"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Last use, size and path of each file; other processes may remove some meanwhile."""
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def _checksum(parcel: Parcel) -> str:
    """Of all bytes of a parcel."""
    code = 0
    for side in (parcel.keys, parcel.values):
        code = zlib.crc32(side.contiguous().view(torch.uint8).numpy().data, code)
    return f"{code:08x}"
