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
from choreo_agents.kv.quantization import dequantize, quantize

Stored = Literal["full", "int8", "low-rank"]
"""How KV is kept below the pool: as it is; in whole numbers of eight bits, exact for what was rounded to them before;
or not at all, because what it was made of is there, and a low-rank correction makes it again."""
Key = TypeVar("Key", bound=Hashable)
_ABANDONED_S = 3600.0
"""Age of a half-written file that nobody is writing any more."""


@dataclass(frozen=True, eq=False)
class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host."""

    keys: Tensor
    values: Tensor
    exponents: Tensor | None = None
    """Of keys and values that are whole numbers (see `quantization`), [2, layers, kv_heads, tokens]."""

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

    def quantized(self) -> HostKV:
        """The same in whole numbers of eight bits; exact for what was rounded to them before."""
        (keys, of_keys), (values, of_values) = quantize(self.keys), quantize(self.values)
        return HostKV(keys, values, torch.stack([of_keys, of_values]))

    def dequantized(self, dtype: torch.dtype) -> HostKV:
        """As the pool has them."""
        if self.exponents is None:
            return self
        of_keys, of_values = self.exponents
        return HostKV(dequantize(self.keys, of_keys, dtype), dequantize(self.values, of_values, dtype))


def stored_bytes(geometry: KVGeometry, stored: Stored) -> int:
    """What a token takes below the pool."""
    heads = 2 * geometry.layers * geometry.kv_heads
    return {"full": geometry.bytes_per_token, "int8": heads * (geometry.head_dim + 1), "low-rank": 0}[stored]


def shapes_of(geometry: KVGeometry, tokens: int, *, quantized: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `HostKV.shapes` says of a message of so many tokens."""
    heads = (geometry.layers, geometry.kv_heads, tokens)
    each = ((*heads, geometry.head_dim), torch.int8 if quantized else geometry.dtype)
    named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"keys": each, "values": each}
    return named | {"exponents": ((2, *heads), torch.int8)} if quantized else named


class HostTier(Generic[Key]):
    """KV in host memory, the least recently used ones leaving when a budget is reached.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._kept: OrderedDict[Key, HostKV] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def bytes_of(self, key: Key) -> int:
        """What it takes here."""
        return self._kept[key].nbytes if key in self._kept else 0

    def put(self, key: Key, kv: HostKV) -> list[tuple[Key, HostKV]]:
        """Keep KV; what leaves for it, oldest first: itself if it is larger than the budget."""
        assert key not in self._kept
        self._kept[key] = kv
        self.used_bytes += kv.nbytes
        left: list[tuple[Key, HostKV]] = []
        while self.used_bytes > self.budget_bytes:
            oldest, leaving = self._kept.popitem(last=False)
            self.used_bytes -= leaving.nbytes
            left.append((oldest, leaving))
        return left

    def take(self, key: Key) -> HostKV | None:
        """Hand KV out and forget it."""
        kv = self._kept.pop(key, None)
        if kv is not None:
            self.used_bytes -= kv.nbytes
        return kv

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert self.used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes


class DiskTier:
    """KV in a folder: one safetensors file for each message, below a folder for each model.

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

    def put(self, key: str, kv: HostKV) -> list[str]:
        """Write KV under a key that says all that it depends on, its position too.

        Returns:
            The keys of what is not there any more: removed to make room, or this one if it alone is over the budget.
        """
        if kv.nbytes > self.budget_bytes:
            return [key]
        path = self._path(key)
        if not path.exists():
            partial = path.with_suffix(f".{uuid4().hex}.partial")
            about = {"message": key, "checksum": _checksum(kv)}
            try:
                save_file(kv.tensors(), partial, metadata=about)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        removed = self._make_room(keep=path)
        return removed if path.exists() else [*removed, key]

    def get(self, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> HostKV | None:
        """Read KV; None unless the file holds this message's keys and values in these shapes."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                kv = HostKV(**{name: file.get_tensor(name) for name in shapes})
        except (OSError, SafetensorError):
            self.drop(key)
            return None
        if kv.shapes() != shapes or about != {"message": key, "checksum": _checksum(kv)}:
            self.drop(key)
            return None
        with suppress(OSError):
            os.utime(path)
        return kv

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


def _checksum(kv: HostKV) -> str:
    """Of all bytes of KV."""
    code = 0
    for side in kv.tensors().values():
        code = zlib.crc32(side.contiguous().view(torch.uint8).numpy().data, code)
    return f"{code:08x}"
