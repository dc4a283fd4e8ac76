"""Where keys and values wait outside of the pool: in host memory, and in a folder of safetensors."""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.rounding import multiplied, whole

Stored = Literal["full", "int8", "low-rank"]
"""How KV is kept below the pool: as it is; in whole numbers of eight bits, exact for what was rounded to them before;
or not at all, because what it was made of is there, and a low-rank correction makes it again."""
Key = TypeVar("Key", bound=Hashable)
_ABANDONED_S = 3600.0
"""Age of a half-written file that nobody is writing any more."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host."""

    keys: Tensor
    values: Tensor
    exponents: Tensor | None = None
    """Of keys and values that are whole numbers (see `rounding`), [2, layers, kv_heads, tokens]."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All that there is, by name."""
        named = {"keys": self.keys, "values": self.values}
        return named if self.exponents is None else named | {"exponents": self.exponents}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}

    def packed(self) -> Parcel:
        """The same in whole numbers of eight bits; exact for what was rounded to them before."""
        (keys, of_keys), (values, of_values) = whole(self.keys), whole(self.values)
        return Parcel(keys, values, torch.stack([of_keys, of_values]))

    def unpacked(self, dtype: torch.dtype) -> Parcel:
        """As the pool has them."""
        if self.exponents is None:
            return self
        of_keys, of_values = self.exponents
        return Parcel(multiplied(self.keys, of_keys, dtype), multiplied(self.values, of_values, dtype))


def stored_bytes(geometry: KVGeometry, stored: Stored) -> int:
    """What a token takes below the pool."""
    heads = 2 * geometry.layers * geometry.kv_heads
    return {"full": geometry.bytes_per_token, "int8": heads * (geometry.head_dim + 1), "low-rank": 0}[stored]


def shapes_of(geometry: KVGeometry, tokens: int, *, packed: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `Parcel.shapes` says of a message of so many tokens."""
    heads = (geometry.layers, geometry.kv_heads, tokens)
    each = ((*heads, geometry.head_dim), torch.int8 if packed else geometry.dtype)
    named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"keys": each, "values": each}
    return named | {"exponents": ((2, *heads), torch.int8)} if packed else named


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
                save_file(parcel.tensors(), partial, metadata=about)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        removed = self._make_room(keep=path)
        return removed if path.exists() else [*removed, key]

    def get(self, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Parcel | None:
        """Read a parcel; None unless the file holds this message's keys and values in these shapes."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                parcel = Parcel(**{name: file.get_tensor(name) for name in shapes})
        except (OSError, SafetensorError):
            self.drop(key)
            return None
        if parcel.shapes() != shapes or about != {"message": key, "checksum": _checksum(parcel)}:
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
        for path in abandoned(self.folder):
            path.unlink(missing_ok=True)

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


def abandoned(folder: Path) -> list[Path]:
    """Files that a process has left half-written: it was killed long ago."""
    found: list[Path] = []
    for path in folder.glob("*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                found.append(path)
    return found


def _checksum(parcel: Parcel) -> str:
    """Of all bytes of a parcel."""
    code = 0
    for side in parcel.tensors().values():
        code = zlib.crc32(side.contiguous().view(torch.uint8).numpy().data, code)
    return f"{code:08x}"
