"""Private files of KV: readable by this user only, written atomically, and read without blocking.

They lie in a directory that outlives engines (`PersistentDirectory`), or in one that is removed with its engine.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file

from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.store.format import UnusableFileError, Written, parsed

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # without flock, files of killed engines stay
    flock = None  # type: ignore[assignment]

SUFFIX, _PARTIAL = ".safetensors", ".partial"
# Opening a FIFO must not wait for its writer, and links are refused.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MAKING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_REPLACED = 8
"""Attempts to open a file that other processes replace meanwhile."""
_ABANDONED_S = 3600.0
"""Age, in seconds, from which a half-written file counts as abandoned."""
BROKEN = ".broken"
"""Suffix of a file that could not be used, and is kept for inspection."""
_JUST_MADE_S = 60.0
"""Age, in seconds, of a directory whose engine may not have locked it yet."""
_ENGINES = re.compile(r"[0-9a-f]{32}")
"""Name of an engine's directory: anything else beside it is neither removed nor counted."""


def private_folder(folder: Path) -> Path:
    """Make a directory, if need be, that only this user can access.

    Raises:
        InvalidRequestError: It is a link, or another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not _ours(about):
        raise InvalidRequestError(f"{str(folder)!r} is a link or another user's: use a folder of your own for KV")
    if stat.S_IMODE(about.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def below(folder: Path, *names: str) -> Path:
    """Make private directories, one in the other, below one that the user has named.

    Raises:
        InvalidRequestError: Another user could replace them.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    shared = stat.S_IMODE(about.st_mode) & 0o002 and not about.st_mode & stat.S_ISVTX
    if shared or not (_ours(about) or about.st_uid == 0):
        raise InvalidRequestError(
            f"{str(folder)!r} is another user's, or everybody may rename files in it: use a folder of your own for KV"
        )
    for name in names:
        folder = private_folder(folder / name)
    return folder


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, and no link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def write_private(path: Path, written: Written) -> None:
    """Write a file that only this user can read, atomically; replaces any file of that name.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_suffix(f".{uuid4().hex}{_PARTIAL}")
    try:
        os.close(os.open(partial, _MAKING, 0o600))
        save_file(written[1], partial, metadata=written[0])
        partial.replace(path)
    except SafetensorError as error:  # a full disk
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_private(path: Path, least: int, most: int) -> Written:
    """Read a file without blocking.

    Args:
        path: The file.
        least: Fewest bytes that are accepted; `most`: the most.

    Raises:
        FileNotFoundError: There is no such file.
        UnusableFileError: It is a link, no regular file, another user's, of another size, or damaged.
    """
    descriptor, status = _open(path)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFileError("is not a regular file")
        if not _ours(status) or status.st_nlink != 1:
            raise UnusableFileError("belongs to another user, or has other hard links")
        if not least <= status.st_size <= most:
            raise UnusableFileError(f"has {status.st_size} bytes, expected {least} to {most}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(status.st_size)
    except OSError as error:
        raise UnusableFileError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
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


def remove_abandoned(folder: Path) -> None:
    """Remove half-written files of processes that were killed long ago."""
    for changed, _, path in list(sizes(folder)):
        if path.suffix == _PARTIAL and time.time() - changed > _ABANDONED_S:
            with suppress(OSError):
                path.unlink()


def used_now(path: Path) -> None:
    """Mark a file as most recently used."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _open(path: Path) -> tuple[int, os.stat_result]:
    """Open a file; return its descriptor and status. Raises as `read_private`."""
    for _ in range(_REPLACED):
        try:
            descriptor = os.open(path, _READING)
        except FileNotFoundError:
            raise
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
            raise UnusableFileError(why) from error
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise UnusableFileError(f"cannot be read: {error.strerror}") from error
        if status.st_nlink:
            return descriptor, status
        os.close(descriptor)  # removed or replaced since it was opened
    raise UnusableFileError("keeps being replaced")


def _ours(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()


class PersistentDirectory:
    """A directory that outlives engines. Processes share it, and none trusts its contents.

    Args:
        folder: The directory that the user named; those below are private to this user.
        names: Path below `folder`.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder.joinpath(*names)
        """Directory of the files; stores may share it."""
        self._top, self._names = folder, names
        remove_abandoned(self.folder)

    def make(self) -> None:
        """Make the directory.

        Raises:
            InvalidRequestError: It, or one above it, is another user's. OSError: It cannot be made.
        """
        below(self._top, *self._names)

    def files(self) -> Iterator[tuple[float, int, Path]]:
        """Return last use, bytes and path of every file that the budget counts, including those of other processes."""
        return (file for file in sizes(self.folder) if file[2].suffix in (SUFFIX, BROKEN))

    def put_away(self, path: Path) -> None:
        """Rename an unusable file so that it is not found again."""
        with suppress(OSError):
            path.replace(path.with_suffix(BROKEN))

    def close(self) -> None:
        """Do nothing: the files stay."""


class EngineDirectory:
    """A directory of one engine, removed with it. Directories that killed engines left are removed, too.

    Has the methods of `PersistentDirectory`.

    Args:
        folder: The directory that the user named; made if need be.
        model: Fingerprint of the model: engines that run it share one budget.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._of_model = below(folder, model)
        self.folder = private_folder(self._of_model / uuid4().hex)
        self._lock = _lock_folder(self.folder)
        self._sweep()

    def make(self) -> None: ...  # nothing to do: after `close` the directory must not come back

    def files(self) -> Iterator[tuple[float, int, Path]]:
        for folder in self._folders():
            yield from (file for file in sizes(folder) if file[2].suffix == SUFFIX)

    def put_away(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _folders(self) -> list[Path]:
        """Return the directories of all engines that run the model."""
        with suppress(OSError):
            return [folder for folder in self._of_model.iterdir() if _ENGINES.fullmatch(folder.name)]
        return []

    def _sweep(self) -> None:
        """Remove the directories of engines whose process was killed."""
        for folder in self._folders() if flock is not None else ():
            with suppress(OSError):
                if folder != self.folder and time.time() - folder.lstat().st_mtime > _JUST_MADE_S:
                    lock = _lock_folder(folder)
                    if lock is not None:
                        shutil.rmtree(folder, ignore_errors=True)
                        os.close(lock)


def _lock_folder(folder: Path) -> int | None:
    """Lock a directory against sweeping until the returned descriptor is closed; None if it is locked already."""
    if flock is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


Directory = PersistentDirectory | EngineDirectory
"""Directory of a store's files."""
