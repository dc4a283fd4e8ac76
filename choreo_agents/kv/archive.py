"""KV that outlives its engine: a folder of safetensors that processes share, none of which trusts it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.tiers import HostKV, abandoned, shapes_of


@dataclass(frozen=True)
class KVKey:
    """All that a message's KV depends on: names it in any process that runs the same model for the same tenant."""

    id: str
    """The message's: an HMAC over model, tokens, parents and their relative places."""
    model: str
    """Fingerprint of the model, with that of its adapter."""
    tokens: tuple[int, ...]
    parents: tuple[tuple[str, int], ...]
    """Ids and places relative to the message's first token."""
    native_offset: int
    """The position that its first token is encoded at; a file of any is good, since views move it."""

    @property
    def handle(self) -> MessageHandle:
        """Of the message, wherever it is held."""
        return MessageHandle(id=self.id, model=self.model, length=len(self.tokens))

    def written(self) -> dict[str, str]:
        """What a file says of it, but for the position."""
        parents = [[parent, offset] for parent, offset in self.parents]
        tokens = json.dumps(list(self.tokens), separators=(",", ":"))
        return {"message": self.id, "model": self.model, "tokens": tokens, "parents": json.dumps(parents)}


class Archive:
    """One file for each message, written whole or not at all, and named by what it holds.

    A file is good only if it says of itself all that was asked for, has the shapes and the type of the model's KV, and
    carries a keyed checksum over all of that; any other is set aside as `.broken` and counts as missing.
    May be used from any thread.

    Args:
        folder: Of one model and one tenant.
        geometry: The model's KV shape.
        seal: The tenant's key: without it nobody can write a file that is taken for good.
        budget_bytes: Of all files; the longest unused ones are removed.
    """

    def __init__(self, folder: Path, geometry: KVGeometry, seal: bytes, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._geometry = geometry
        self._seal = seal
        folder.mkdir(parents=True, exist_ok=True)
        for path in abandoned(folder):
            path.unlink(missing_ok=True)

    def has(self, message_id: str) -> bool:
        """Whether there is a file, good or not."""
        return self._path(message_id).exists()

    def save(self, key: KVKey, kv: HostKV) -> bool:
        """Write a message's KV, unless there is a file of it; whether there is one now.

        One that is larger than the whole budget is not written.
        """
        path = self._path(key.id)
        if path.exists():
            return True
        if kv.nbytes > self.budget_bytes:
            return False
        about = key.written() | {"native_offset": str(key.native_offset)}
        partial = path.with_suffix(f".{uuid4().hex}.partial")
        try:
            save_file(kv.tensors(), partial, metadata=about | {"seal": self._sealed(about, kv)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._make_room(path)
        return path.exists()

    def load(self, key: KVKey) -> tuple[HostKV, int] | None:
        """A message's KV, and the position that it was encoded at; None if there is no good file."""
        path = self._path(key.id)
        try:
            with safe_open(path, framework="pt") as file:
                about = dict(file.metadata() or {})
                names = sorted(file.keys())
                shapes = shapes_of(self._geometry, len(key.tokens), quantized=False)
                kv = HostKV(**{name: file.get_tensor(name) for name in names}) if names == sorted(shapes) else None
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError):
            self.set_aside(key.id)
            return None
        seal, at = about.pop("seal", ""), about.get("native_offset", "")
        good = (
            kv is not None
            and kv.shapes() == shapes
            and at.isdecimal()
            and about == key.written() | {"native_offset": at}
            and seal == self._sealed(about, kv)
        )
        if kv is None or not good:
            self.set_aside(key.id)
            return None
        with suppress(OSError):
            os.utime(path)
        return kv, int(at)

    def drop(self, message_id: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self._path(message_id).unlink(missing_ok=True)

    def set_aside(self, message_id: str) -> None:
        """Keep a file that cannot be used for whoever wants to know why, under another name."""
        path = self._path(message_id)
        with suppress(OSError):
            path.replace(path.with_suffix(".broken"))

    def used_bytes(self) -> int:
        """Of all files, other processes' included."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, keep: Path) -> None:
        """Remove the longest unused files over the budget; one process at a time, or they would all remove some."""
        if self.used_bytes() <= self.budget_bytes:
            return
        with suppress(Timeout), FileLock(self.folder / ".room.lock", blocking=False):
            files = self._files()
            used = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if used <= self.budget_bytes:
                    return
                if path != keep:
                    with suppress(OSError):
                        path.unlink()
                    used -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """Last use, size and path of each file; other processes may remove some meanwhile."""
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                about = path.stat()
                if path.suffix in (".safetensors", ".broken"):
                    found.append((about.st_mtime, about.st_size, path))
        return found

    def _sealed(self, about: Mapping[str, str], kv: HostKV) -> str:
        """A keyed checksum over what a file says of itself and all bytes of its tensors."""
        code = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), key=self._seal, digest_size=16)
        for side in kv.tensors().values():
            code.update(side.contiguous().view(torch.uint8).numpy().data)
        return code.hexdigest()

    def _path(self, message_id: str) -> Path:
        return self.folder / f"{message_id}.safetensors"
