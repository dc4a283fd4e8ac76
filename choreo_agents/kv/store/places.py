"""Folders that stores keep their files in: one that outlives engines, and one that is gone with its engine."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from choreo_agents.kv.store.files import SUFFIX, below, private_folder, remove_abandoned, sizes

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # where there is none, what killed engines leave stays
    flock = None  # type: ignore[assignment]

BROKEN = ".broken"
"""What a file is called that could not be used, and is kept for whoever wants to know why."""
_JUST_MADE_S = 60.0
"""Age of a folder whose engine may not hold it yet."""
_ENGINES = re.compile(r"[0-9a-f]{32}")
"""What an engine's folder is called: nothing else of what may stand beside it is removed, or counted."""


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
