"""KV in a folder that dies with its engine: nobody else's files are believed there, nor any after it."""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch

from choreo_agents.kv.files import (
    SUFFIX,
    UnusableFileError,
    below,
    private_folder,
    read_private,
    seal_of,
    sizes,
    used_now,
    write_private,
)
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import FileSkipped

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # where there is none, what killed engines leave stays
    flock = None  # type: ignore[assignment]

_HEADER_BYTES = 4096
"""Of a file, at most."""
_JUST_MADE_S = 60.0
"""Age of a folder whose engine may not hold it yet."""


class DiskTier:
    """KV in a folder: one safetensors file for each message, below a folder for each engine and one for each model.

    Files are written whole or not at all, and sealed with a key that nobody but this object ever has. One that is
    missing, damaged, forged or no file at all counts as lost, and is told of in `skipped`. Slow: call it from a thread
    of its own, one call at a time.

    Args:
        folder: The user's; made if need be.
        budget_bytes: Of all files of this model; the longest unused ones are removed.
        model: Fingerprint of model and adapter.
    """

    def __init__(self, folder: Path, budget_bytes: int, model: str) -> None:
        self.budget_bytes = budget_bytes
        self.skipped: deque[FileSkipped] = deque()
        """Files that could not be used, for whoever tells of them."""
        self._key = secrets.token_bytes(32)
        self._model_folder = below(folder, model)
        self.folder = private_folder(self._model_folder / uuid4().hex)
        self._held = _held(self.folder)
        self._sweep()

    def put(self, key: str, kv: HostKV) -> list[str]:
        """Write KV under a key that says all that it depends on, its position too.

        Returns:
            The keys of what is not there any more: removed to make room, or this one if it alone is over the budget.
        """
        if kv.nbytes > self.budget_bytes:
            return [key]
        path, about = self._path(key), {"message": key}
        write_private(path, kv.tensors(), about | {"seal": seal_of(self._key, about, kv.tensors())})
        removed = self._make_room(keep=path)
        return removed if path.exists() else [*removed, key]

    def get(self, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> HostKV | None:
        """Read KV; None unless the file holds this message's keys and values in these shapes."""
        path = self._path(key)
        try:
            kv = self._read(path, key, shapes)
        except (UnusableFileError, FileNotFoundError) as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else str(error)
            self.skipped.append(FileSkipped(time.perf_counter(), str(path), why))
            self.drop(key)
            return None
        used_now(path)
        return kv

    def drop(self, key: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all that is this engine's."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _read(self, path: Path, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> HostKV:
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
        about, tensors = read_private(path, nbytes, nbytes + _HEADER_BYTES)
        seal = about.pop("seal", "")
        if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != dict(shapes):
            raise UnusableFileError("holds other keys and values")
        if about != {"message": key} or not hmac.compare_digest(seal, seal_of(self._key, about, tensors)):
            raise UnusableFileError("does not bear this engine's seal")
        return HostKV(**tensors)

    def _make_room(self, keep: Path) -> list[str]:
        files = list(sizes(self._model_folder, f"*/*{SUFFIX}"))
        used = sum(size for _, size, _ in files)
        removed: list[str] = []
        for _, size, path in sorted(files):
            if used <= self.budget_bytes:
                break
            if path != keep:
                with suppress(OSError):
                    path.unlink()
                used -= size
                if path.parent == self.folder:
                    removed.append(path.stem)
        return removed

    def _sweep(self) -> None:
        """Remove what engines have left whose process was killed."""
        for folder in self._model_folder.iterdir() if flock is not None else ():
            with suppress(OSError):
                if folder != self.folder and time.time() - folder.lstat().st_mtime > _JUST_MADE_S:
                    held = _held(folder)
                    if held is not None:
                        shutil.rmtree(folder, ignore_errors=True)
                        os.close(held)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def _held(folder: Path) -> int | None:
    """A descriptor that keeps others from sweeping a folder until it is closed; None if another keeps this one."""
    if flock is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
