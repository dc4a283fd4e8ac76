"""Store of KV files: one sealed file per message, named by the message's id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.store.files import SUFFIX, Directory, is_regular, read_private, used_now, write_private
from choreo_agents.kv.store.format import UnusableFileError, kv_bytes, most_bytes, opened, sealed
from choreo_agents.kv.store.key import FileKey
from choreo_agents.kv.tiers import HostKV

_WRITERS = 8
"""Processes among which the free budget is divided, so that each can write some files without a new listing."""


class KVStore:
    """Files of KV, one per message, written atomically. Thread-safe.

    A file is accepted only if its metadata matches the key, its tensors have the shapes and type of the model's KV, and
    its seal, a keyed checksum over both, is right. Any other file is set aside and counts as missing. Files of other
    processes in the same directory are accepted if they were sealed with the same key. All methods but `knows` use the
    disk.

    Args:
        directory: Directory of the files.
        geometry: Shape of the model's KV.
        seal: Secret key, without which nobody can write a file that is accepted.
        budget_bytes: Of all files in the directory; the least recently used ones are removed.
        skipped: Called with the path of every file that could not be used, and why.
        removed: Called with the id of every message whose file is removed for space.
    """

    def __init__(
        self,
        directory: Directory,
        geometry: KVGeometry,
        seal: bytes,
        budget_bytes: int,
        skipped: Callable[[Path, str], None] = lambda path, why: None,
        removed: Callable[[str], None] = lambda message_id: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.folder = directory.folder
        self._directory = directory
        self._geometry = geometry
        self._seal = seal
        self._skipped, self._removed = skipped, removed
        self._known: set[str] = set()
        """Ids of messages that have a file, as of the last look."""
        self._lock = Lock()
        """Held while `_known` changes, together with the look at the files from which the change follows."""
        self._spare_bytes = -1
        """Bytes that may be written before the directory is listed again."""
        self.look()

    def knows(self, message_id: str) -> bool:
        """Return whether there was a file when the store last looked, without looking."""
        return message_id in self._known

    def has(self, message_id: str) -> bool:
        """Look whether there is a file, usable or not, and remember it for `knows`."""
        with self._lock:
            exists = is_regular(self._path(message_id))
            if exists:
                self._known.add(message_id)
            else:
                self._known.discard(message_id)
            return exists

    def look(self) -> int:
        """List all files, including those of other processes, and return their bytes in all."""
        return sum(size for _, size, _ in self._list())

    def save(self, key: FileKey, kv: HostKV) -> bool:
        """Write a message's KV unless it has a file; return whether it has one now.

        KV that is larger than the whole budget is not written.

        Raises:
            OSError: It cannot be written.
        """
        if self.has(key.id):
            return True
        if kv.nbytes > self.budget_bytes:
            return False
        self._directory.make()
        path = self._path(key.id)
        write_private(path, sealed(key, kv, self._seal))
        self.has(key.id)
        self._enforce_budget(path)
        return self.has(key.id)

    def load(self, key: FileKey) -> tuple[HostKV, int] | None:
        """Read a message's KV, and the position at which it was encoded; None if there is no usable file."""
        path = self._path(key.id)
        try:
            least, most = kv_bytes(key, self._geometry), most_bytes(key, self._geometry)
            loaded = opened(read_private(path, least, most), key, self._geometry, self._seal)
        except FileNotFoundError:
            if self.knows(key.id) and not self.has(key.id):  # unless this store removed it itself
                self._skipped(path, "is missing")
            return None
        except UnusableFileError as error:
            self.set_aside(key.id, str(error))
            return None
        used_now(path)
        return loaded

    def drop(self, message_id: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        with self._lock:
            self._path(message_id).unlink(missing_ok=True)
            self._known.discard(message_id)

    def set_aside(self, message_id: str, why: str) -> None:
        """Move an unusable file away so that it is not found again."""
        path = self._path(message_id)
        with self._lock:
            self._directory.put_away(path)
            self._known.discard(message_id)
        self._skipped(path, why)

    def close(self) -> None:
        """Close the directory: an engine's own one is removed."""
        self._directory.close()

    def _enforce_budget(self, written: Path) -> None:
        """Remove the least recently used files over the budget; the one just written only if it is too large alone.

        Processes that find the directory too full at the same time choose the same files.
        """
        try:
            size = written.lstat().st_size
        except OSError:
            return  # another process has removed it already
        if size > self.budget_bytes:
            self.drop(written.stem)
            return
        self._spare_bytes -= size
        if self._spare_bytes >= 0:
            return
        files = sorted(self._list(), key=lambda file: (file[2] == written, file))
        used = sum(size for _, size, _ in files)
        size_of = {path: size for _, size, path in files}
        for path in leaving(size_of.items(), used - self.budget_bytes):
            ours = path.parent == self.folder and path.suffix == SUFFIX
            with self._lock, suppress(OSError):
                if ours:
                    self._known.discard(path.stem)
                path.unlink()
            used -= size_of[path]
            if ours:
                self._removed(path.stem)
        self._spare_bytes = (self.budget_bytes - used) // _WRITERS

    def _list(self) -> list[tuple[float, int, Path]]:
        """List the directory's files, and remember those that are this store's."""
        with self._lock:  # else what other threads note meanwhile would be forgotten
            files = list(self._directory.files())
            self._known = {path.stem for _, _, path in files if path.suffix == SUFFIX and path.parent == self.folder}
        return files

    def _path(self, message_id: str) -> Path:
        return self.folder / f"{message_id}{SUFFIX}"
