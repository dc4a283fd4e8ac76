"""Files of keys and values that nobody else can read: written whole or not at all, and read without waiting.

They lie in a folder that outlives engines, or in one that is gone with its engine.
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
except ImportError:  # where there is none, what killed engines leave stays
    flock = None  # type: ignore[assignment]

SUFFIX, _PARTIAL = ".safetensors", ".partial"
# A FIFO is opened without waiting for who writes it, and a link not at all.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MAKING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_REPLACED = 8
"""Times that a file may be replaced while it is opened: as many as write it at once."""
_ABANDONED_S = 3600.0
"""Age of a half-written file that nobody is writing any more."""
BROKEN = ".broken"
"""What a file is called that could not be used, and is kept for whoever wants to know why."""
_JUST_MADE_S = 60.0
"""Age of a folder whose engine may not hold it yet."""
_ENGINES = re.compile(r"[0-9a-f]{32}")
"""What an engine's folder is called: nothing else of what may stand beside it is removed, or counted."""


def private_folder(folder: Path) -> Path:
    """A folder of this user's that nobody else can look into; made if need be.

    Raises:
        InvalidRequestError: It is a link, or another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not _ours(about):
        raise InvalidRequestError(f"{str(folder)!r} is a link or another user's: give a folder of your own for KV")
    if stat.S_IMODE(about.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def below(folder: Path, *names: str) -> Path:
    """A private folder inside one that the user has named, each level of which is private.

    Raises:
        InvalidRequestError: Another user could put a folder in its place.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    shared = stat.S_IMODE(about.st_mode) & 0o002 and not about.st_mode & stat.S_ISVTX
    if shared or not (_ours(about) or about.st_uid == 0):
        raise InvalidRequestError(
            f"{str(folder)!r} is another user's, or everybody may rename what is in it: "
            "give a folder of your own for KV"
        )
    for name in names:
        folder = private_folder(folder / name)
    return folder


def is_regular(path: Path) -> bool:
    """Whether a file is there, and is neither a link nor anything that is no file."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def write_private(path: Path, written: Written) -> None:
    """Write a file that only this user can read: whole, or not at all. Whatever stood in its place is replaced.

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
    """What a file holds. Waits for nobody.

    Args:
        path: Which.
        least: Bytes that it must have, and `most` that it may have: no other is read.

    Raises:
        FileNotFoundError: There is none.
        UnusableFileError: It is a link, no regular file, another user's, of another size, or damaged.
    """
    descriptor, found = _opened(path)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise UnusableFileError("is no regular file")
        if not _ours(found) or found.st_nlink != 1:
            raise UnusableFileError("is another user's, or has another name, too")
        if not least <= found.st_size <= most:
            raise UnusableFileError(f"has {found.st_size} bytes, not {least} to {most}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    except OSError as error:
        raise UnusableFileError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return parsed(data)


def sizes(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Last use, bytes and path of what is in a folder, if there is one; other processes may remove some meanwhile."""
    found: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        with suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(about.st_mode):
                yield about.st_mtime, about.st_size, folder / entry.name


def remove_abandoned(folder: Path) -> None:
    """Remove what processes have left half-written: they were killed long ago."""
    for changed, _, path in list(sizes(folder)):
        if path.suffix == _PARTIAL and time.time() - changed > _ABANDONED_S:
            with suppress(OSError):
                path.unlink()


def used_now(path: Path) -> None:
    """It was read: let it be the last that leaves for others."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _opened(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor of a file, and what it says of that; raises what `read_private` raises."""
    for _ in range(_REPLACED):
        try:
            descriptor = os.open(path, _READING)
        except FileNotFoundError:
            raise
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
            raise UnusableFileError(why) from error
        try:
            found = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise UnusableFileError(f"cannot be read: {error.strerror}") from error
        if found.st_nlink:
            return descriptor, found
        os.close(descriptor)  # removed, or replaced by who wrote the same, since it was opened
    raise UnusableFileError("is replaced again and again")


def _ours(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()


class LastingPlace:
    """A folder that outlives engines; processes share it, none of which trusts it.

    Args:
        folder: The user's. In it are folders that only this user can look into.
        names: Of these, the last of which is the place.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder.joinpath(*names)
        """Of the store alone, or of those that share what is in it."""
        self._top, self._names = folder, names
        remove_abandoned(self.folder)

    def make(self) -> None:
        """Have the folder there.

        Raises:
            InvalidRequestError: It, or one above it, is another user's. OSError: It cannot be made.
        """
        below(self._top, *self._names)

    def files(self) -> Iterator[tuple[float, int, Path]]:
        """Last use, bytes and path of every file that the budget counts, others' included."""
        return (each for each in sizes(self.folder) if each[2].suffix in (SUFFIX, BROKEN))

    def put_away(self, path: Path) -> None:
        """What stands there cannot be used: let it not be found again."""
        with suppress(OSError):
            path.replace(path.with_suffix(BROKEN))

    def close(self) -> None:
        """The store is used no more."""


class EnginePlace:
    """A folder of one engine's, beside those of others that run the same model; what killed ones left is removed.

    Its functions do what those of a `LastingPlace` do.

    Args:
        folder: The user's; made if need be.
        model: Fingerprint of the model: engines that run it share one budget.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._of_model = below(folder, model)
        self.folder = private_folder(self._of_model / uuid4().hex)
        self._held = _held(self.folder)
        self._sweep()

    def make(self) -> None: ...  # once removed, it stays so: its engine has ended

    def files(self) -> Iterator[tuple[float, int, Path]]:
        for folder in self._folders():
            yield from (each for each in sizes(folder) if each[2].suffix == SUFFIX)

    def put_away(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _folders(self) -> list[Path]:
        """Of all engines that run the model."""
        with suppress(OSError):
            return [folder for folder in self._of_model.iterdir() if _ENGINES.fullmatch(folder.name)]
        return []

    def _sweep(self) -> None:
        """Remove what engines have left whose process was killed."""
        for folder in self._folders() if flock is not None else ():
            with suppress(OSError):
                if folder != self.folder and time.time() - folder.lstat().st_mtime > _JUST_MADE_S:
                    held = _held(folder)
                    if held is not None:
                        shutil.rmtree(folder, ignore_errors=True)
                        os.close(held)


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


Place = LastingPlace | EnginePlace
"""Where a store has its files."""
