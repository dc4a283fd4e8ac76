"""KV in files: one for each message, named by what it holds, sealed, and believed by nobody without the key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.store.files import SUFFIX, Place, is_regular, read_private, used_now, write_private
from choreo_agents.kv.store.format import UnusableFileError, kv_bytes, most_bytes, opened, sealed
from choreo_agents.kv.store.key import FileKey
from choreo_agents.kv.tiers import HostKV

_WRITERS = 8
"""Processes that may write at once without looking at each other's files, as long as there is room for all of them."""


class KVStore:
    """One file for each message, written whole or not at all.

    A file is good only if it says of itself all that was asked for, has the shapes and the type of the model's KV, and
    carries a keyed checksum over all of that; any other is put away and counts as missing, and nobody waits for it.
    Files that other processes write into the same place are good, too, if they have the same key. Slow, but for
    `knows`. May be used from any thread.

    Args:
        place: Where the files are.
        geometry: The model's KV shape.
        seal: The key: without it nobody can write a file that is taken for good.
        budget_bytes: Of all files of the place; the longest unused ones are removed.
        skipped: Told of every file that could not be used: where it was, and why.
        removed: Told of every message whose file had to make room for others.
    """

    def __init__(
        self,
        place: Place,
        geometry: KVGeometry,
        seal: bytes,
        budget_bytes: int,
        skipped: Callable[[Path, str], None] = lambda path, why: None,
        removed: Callable[[str], None] = lambda message_id: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.folder = place.folder
        self._place = place
        self._geometry = geometry
        self._seal = seal
        self._skipped, self._removed = skipped, removed
        self._there: set[str] = set()
        """Messages that have a file, as far as is known without looking."""
        self._listing = Lock()
        """Held while the folder is listed: one listing at a time."""
        self._noting = Lock()
        """Held while `_there` changes, with the look at the one file that the change follows from."""
        self._noted: dict[str, bool] | None = None
        """While the folder is listed: what other threads have noted of single files."""
        self._spare_bytes = -1
        """That may be written before looking how much there is."""
        self.look()

    def knows(self, message_id: str) -> bool:
        """Whether there was a file when the store last looked. Does not look."""
        return message_id in self._there

    def has(self, message_id: str) -> bool:
        """Whether there is a file, good or not; `knows` knows it from then on."""
        with self._noting:
            return self._note(message_id, there=is_regular(self._path(message_id)))

    def look(self) -> int:
        """See which files there are, other processes' included; the bytes of all."""
        return sum(size for _, size, _ in self._list())

    def save(self, key: FileKey, kv: HostKV) -> bool:
        """Write a message's KV, unless there is a file of it; whether there is one now.

        One that is larger than the whole budget is not written.

        Raises:
            OSError: It cannot be written.
        """
        if self.has(key.id):
            return True
        if kv.nbytes > self.budget_bytes:
            return False
        self._place.make()
        path = self._path(key.id)
        write_private(path, sealed(key, kv, self._seal))
        self.has(key.id)
        self._make_room(path)
        return self.has(key.id)

    def load(self, key: FileKey) -> tuple[HostKV, int] | None:
        """A message's KV, and the position that it was encoded at; None if there is no good file."""
        path = self._path(key.id)
        try:
            least, most = kv_bytes(key, self._geometry), most_bytes(key, self._geometry)
            found = opened(read_private(path, least, most), key, self._geometry, self._seal)
        except FileNotFoundError:
            if self.knows(key.id) and not self.has(key.id):  # who removes files tells of it
                self._skipped(path, "is missing")
            return None
        except UnusableFileError as error:
            self.set_aside(key.id, str(error))
            return None
        used_now(path)
        return found

    def drop(self, message_id: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        with self._noting:
            self._path(message_id).unlink(missing_ok=True)
            self._note(message_id, there=False)

    def set_aside(self, message_id: str, why: str) -> None:
        """Let a file that cannot be used not be found again."""
        path = self._path(message_id)
        with self._noting:
            self._place.put_away(path)
            self._note(message_id, there=False)
        self._skipped(path, why)

    def close(self) -> None:
        """It is used no more: what is gone with its engine is removed."""
        self._place.close()

    def _make_room(self, written: Path) -> None:
        """Remove the longest unused files over the budget; what was just written only if that is over it alone.

        All processes that find the place too full at once remove the same files.
        """
        try:
            size = written.lstat().st_size
        except OSError:
            return  # it had to make room for others' already
        if size > self.budget_bytes:
            self.drop(written.stem)
            return
        self._spare_bytes -= size
        if self._spare_bytes >= 0:
            return
        files = sorted(self._list(), key=lambda each: (each[2] == written, each))
        used = sum(size for _, size, _ in files)
        size_of = {path: size for _, size, path in files}
        for path in leaving(size_of.items(), used - self.budget_bytes):
            ours = path.parent == self.folder and path.suffix == SUFFIX
            with self._noting, suppress(OSError):
                if ours:
                    self._note(path.stem, there=False)
                path.unlink()
            used -= size_of[path]
            if ours:
                self._removed(path.stem)
        self._spare_bytes = (self.budget_bytes - used) // _WRITERS

    def _list(self) -> list[tuple[float, int, Path]]:
        """List the place's files, and know those of this folder.

        Other threads go on meanwhile. What they note of a file while the folder is read is newer than the listing, and
        wins: else a file that a reader has just set aside would count as there, and never be written again.
        """
        with self._listing:
            noted: dict[str, bool] = {}
            with self._noting:
                self._noted = noted
            try:
                files = list(self._place.files())
                listed = {path.stem for _, _, path in files if path.suffix == SUFFIX and path.parent == self.folder}
                with self._noting:
                    self._there = {each for each in listed | noted.keys() if noted.get(each, True)}
            finally:
                self._noted = None
        return files

    def _note(self, message_id: str, *, there: bool) -> bool:
        """Remember whether a message has a file; the caller holds `_noting`."""
        (self._there.add if there else self._there.discard)(message_id)
        if self._noted is not None:
            self._noted[message_id] = there
        return there

    def _path(self, message_id: str) -> Path:
        return self.folder / f"{message_id}{SUFFIX}"
