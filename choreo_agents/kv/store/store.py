"""Store of KV files: one sealed file per message, named by the message's id.

Files are readable by this user only, written atomically, and read without blocking. They lie in a directory that
outlives engines. Processes share it, and none trusts its contents.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file

from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.store.format import UnusableFileError, Written, most_bytes, opened, parsed, sealed
from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.tiers import HostKV

SUFFIX, _PARTIAL = ".safetensors", ".partial"
# Opening a FIFO must not wait for its writer, and links are refused.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_ABANDONED_S = 3600.0
"""Age, in seconds, from which a half-written file counts as abandoned."""
BROKEN = ".broken"
"""Suffix of a file that could not be used, and is kept for inspection."""
_WRITERS = 8
"""Processes among which the free budget is divided, so that each can write some files without a new listing."""


class KVStore:
    """Files of KV, one per message, written atomically. Thread-safe.

    A file is accepted only if its metadata matches the key, its tensors have the shapes and type of the model's KV, and
    its seal, a keyed checksum over both, is right. Any other file is set aside and counts as missing. Files of other
    processes in the same directory are accepted if they were sealed with the same key. All methods but `knows` use the
    disk.

    Args:
        top: The directory that the user named; those below are private to this user.
        names: Path of the files' directory below it.
        geometry: Shape of the model's KV.
        seal: Secret key, without which nobody can write a file that is accepted.
        budget_bytes: Of all files in the directory; the least recently used ones are removed.
        skipped: Called with the path of every file that could not be used, and why.
    """

    def __init__(
        self,
        top: Path,
        names: Sequence[str],
        geometry: KVGeometry,
        seal: bytes,
        budget_bytes: int,
        skipped: Callable[[Path, str], None] = lambda path, why: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.folder = top.joinpath(*names)
        self._top, self._names = top, names
        self._geometry = geometry
        self._seal = seal
        self._skipped = skipped
        self._known: set[str] = set()
        """Ids of messages that have a file, as of the last look."""
        self._lock = Lock()
        """Held while `_known` changes, together with the look at the files from which the change follows."""
        self._spare_bytes = -1
        """Bytes that may be written before the directory is listed again."""
        self.look()

    def make_folder(self) -> None:
        """Make the directory, which only this user can access.

        Raises:
            InvalidRequestError: It, or one above it, is another user's. OSError: It cannot be made.
        """
        folder = self._top
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        shared = stat.S_IMODE(about.st_mode) & 0o002 and not about.st_mode & stat.S_ISVTX
        if shared or not (_ours(about) or about.st_uid == 0):
            raise InvalidRequestError(
                f"{str(folder)!r} is another user's, or everybody may rename files in it: use a folder of your own for "
                "KV"
            )
        for name in self._names:
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or not _ours(about):
                raise InvalidRequestError(
                    f"{str(folder)!r} is a link or another user's: use a folder of your own for KV"
                )
            if stat.S_IMODE(about.st_mode) & 0o077:
                folder.chmod(0o700)

    def knows(self, message_id: str) -> bool:
        """Return whether there was a file when the store last looked, without looking."""
        return message_id in self._known

    def has(self, message_id: str) -> bool:
        """Look whether there is a file, usable or not, and remember it for `knows`."""
        with self._lock:
            exists = False
            with suppress(OSError):
                exists = stat.S_ISREG(self._path(message_id).lstat().st_mode)
            # Changed once, after the look: `knows` is asked meanwhile without the lock.
            (self._known.add if exists else self._known.discard)(message_id)
            return exists

    def look(self) -> int:
        """List all files, including those of other processes, and return their bytes in all."""
        return sum(size for _, size, _ in self._list())

    def save(self, key: KVKey, kv: HostKV) -> bool:
        """Write a message's KV unless it has a file; return whether it has one now.

        KV that is larger than the whole budget is not written.

        Raises:
            OSError: It cannot be written.
        """
        if self.has(key.id):
            return True
        if kv.nbytes > self.budget_bytes:
            return False
        self.make_folder()
        path = self._path(key.id)
        write_private(path, sealed(key, kv, self._seal))
        self._enforce_budget(path)
        return self.has(key.id)

    def load(self, message_id: str, tokens: int) -> tuple[HostKV, int] | None:
        """Read a message's KV, and the position at which it was encoded; None if there is no usable file."""
        path, least = self._path(message_id), self._geometry.bytes_per_token * tokens
        try:
            written = read_private(path, least, most_bytes(tokens, self._geometry))
            loaded = opened(written, {"message": message_id}, tokens, self._geometry, self._seal)
        except FileNotFoundError:
            if self.knows(message_id) and not self.has(message_id):  # unless this store removed it itself
                self._skipped(path, "is missing")
            return None
        except UnusableFileError as error:
            self._set_aside(message_id, str(error))
            return None
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)  # it is the most recently used one
        return loaded

    def drop(self, message_id: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        with self._lock:
            self._path(message_id).unlink(missing_ok=True)
            self._known.discard(message_id)

    def _set_aside(self, message_id: str, why: str) -> None:
        """Rename an unusable file so that it is not found again."""
        path = self._path(message_id)
        with self._lock:
            with suppress(OSError):
                path.replace(path.with_suffix(BROKEN))
            self._known.discard(message_id)
        self._skipped(path, why)

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
            with self._lock, suppress(OSError):
                self._known.discard(path.stem)
                path.unlink()
            used -= size_of[path]
        self._spare_bytes = (self.budget_bytes - used) // _WRITERS

    def _list(self) -> list[tuple[float, int, Path]]:
        """List the directory's files, and remember those that can be read; remove half-written ones of killed
        processes."""
        files: list[tuple[float, int, Path]] = []
        with self._lock:  # else what other threads note meanwhile would be forgotten
            for used, size, path in sizes(self.folder):
                if path.suffix in (SUFFIX, BROKEN):
                    files.append((used, size, path))
                elif path.suffix == _PARTIAL and time.time() - used > _ABANDONED_S:
                    with suppress(OSError):
                        path.unlink()
            self._known = {path.stem for _, _, path in files if path.suffix == SUFFIX}
        return files

    def _path(self, message_id: str) -> Path:
        return self.folder / f"{message_id}{SUFFIX}"


def write_private(path: Path, written: Written) -> None:
    """Write a file that only this user can read, atomically; replaces any file of that name.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_suffix(f".{uuid4().hex}{_PARTIAL}")
    try:
        partial.touch(0o600, exist_ok=False)
        save_file(written[1], partial, metadata=written[0])
        partial.replace(path)
    except SafetensorError as error:  # a full disk
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_private(path: Path, least: int, most: int, attempts: int = 8) -> Written:
    """Read a file without blocking.

    Args:
        path: The file.
        least: Fewest bytes that are accepted; `most`: the most.
        attempts: Most attempts to open it if other processes replace it meanwhile.

    Raises:
        FileNotFoundError: There is no such file.
        UnusableFileError: It is a link, no regular file, another user's, of another size, or damaged.
    """
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _READING)) as file:
            status = os.fstat(file.fileno())
            if not status.st_nlink:  # removed or replaced since it was opened
                if attempts == 1:
                    raise UnusableFileError("keeps being replaced")
                return read_private(path, least, most, attempts - 1)
            if not stat.S_ISREG(status.st_mode):
                raise UnusableFileError("is not a regular file")
            if not _ours(status) or status.st_nlink != 1:
                raise UnusableFileError("belongs to another user, or has other hard links")
            if not least <= status.st_size <= most:
                raise UnusableFileError(f"has {status.st_size} bytes, expected {least} to {most}")
            data = file.read(status.st_size)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise UnusableFileError(why) from error
    return parsed(data)


def sizes(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield last use, bytes and path of the files in a directory; other processes may remove some meanwhile."""
    listed: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        listed = list(entries)
    for entry in listed:
        with suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(about.st_mode):
                yield about.st_mtime, about.st_size, folder / entry.name


def _ours(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()
