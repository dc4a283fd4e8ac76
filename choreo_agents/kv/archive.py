"""KV that outlives its engine: a folder of safetensors that processes share, none of which trusts it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from choreo_agents.kv.files import (
    SUFFIX,
    UnusableFileError,
    below,
    is_regular,
    read_private,
    remove_abandoned,
    seal_of,
    sizes,
    used_now,
    write_private,
)
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.tiers import HostKV, shapes_of

_HEADER_BYTES, _TOKEN_BYTES, _PARENT_BYTES = 1 << 16, 16, 128
"""Of what a file says of itself, at most: by itself, for each token and for each parent."""


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
    carries a keyed checksum over all of that; any other is set aside as `.broken` and counts as missing, and nobody
    waits for it. May be used from any thread.

    Args:
        folder: The user's. In it are folders that only this user can look into.
        place: Their names: of the model and the tenant.
        geometry: The model's KV shape.
        seal: The tenant's key: without it nobody can write a file that is taken for good.
        budget_bytes: Of all files; the longest unused ones are removed.
        skipped: Told of every file that is set aside: where it was, and why.

    Raises:
        InvalidRequestError: The folder, or one in it, is another user's.
    """

    def __init__(
        self,
        folder: Path,
        place: Sequence[str],
        geometry: KVGeometry,
        seal: bytes,
        budget_bytes: int,
        skipped: Callable[[Path, str], None] = lambda path, why: None,
    ) -> None:
        self.folder = below(folder, *place)
        self.budget_bytes = budget_bytes
        self._geometry = geometry
        self._seal = seal
        self._skipped = skipped
        remove_abandoned(self.folder)

    def has(self, message_id: str) -> bool:
        """Whether there is a file, good or not."""
        return is_regular(self._path(message_id))

    def save(self, key: KVKey, kv: HostKV) -> bool:
        """Write a message's KV, unless there is a file of it; whether there is one now.

        One that is larger than the whole budget is not written.
        """
        path = self._path(key.id)
        if is_regular(path):
            return True
        if kv.nbytes > self.budget_bytes:
            return False
        about = key.written() | {"native_offset": str(key.native_offset)}
        write_private(path, kv.tensors(), about | {"seal": seal_of(self._seal, about, kv.tensors())})
        self._make_room(path)
        return path.exists()

    def load(self, key: KVKey) -> tuple[HostKV, int] | None:
        """A message's KV, and the position that it was encoded at; None if there is no good file."""
        path = self._path(key.id)
        try:
            found = self._read(path, key)
        except FileNotFoundError:
            return None
        except UnusableFileError as error:
            self.set_aside(key.id, str(error))
            return None
        used_now(path)
        return found

    def drop(self, message_id: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self._path(message_id).unlink(missing_ok=True)

    def set_aside(self, message_id: str, why: str) -> None:
        """Keep a file that cannot be used for whoever wants to know why, under another name."""
        path = self._path(message_id)
        with suppress(OSError):
            path.replace(path.with_suffix(".broken"))
        self._skipped(path, why)

    def used_bytes(self) -> int:
        """Of all files, other processes' included."""
        return sum(size for _, size, _ in self._files())

    def _read(self, path: Path, key: KVKey) -> tuple[HostKV, int]:
        shapes = shapes_of(self._geometry, len(key.tokens), quantized=False)
        nbytes = self._geometry.bytes_per_token * len(key.tokens)
        header = _HEADER_BYTES + _TOKEN_BYTES * len(key.tokens) + _PARENT_BYTES * len(key.parents)
        about, tensors = read_private(path, nbytes, nbytes + header)
        seal, at = about.pop("seal", ""), about.get("native_offset", "")
        if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != shapes:
            raise UnusableFileError("holds other keys and values")
        if not at.isdecimal() or about != key.written() | {"native_offset": at}:
            raise UnusableFileError("is of another message")
        if not hmac.compare_digest(seal, seal_of(self._seal, about, tensors)):
            raise UnusableFileError("does not bear the tenant's seal")
        return HostKV(**tensors), int(at)

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
        """Last use, size and path of each file."""
        return [each for each in sizes(self.folder) if each[2].suffix in (SUFFIX, ".broken")]

    def _path(self, message_id: str) -> Path:
        return self.folder / f"{message_id}{SUFFIX}"
