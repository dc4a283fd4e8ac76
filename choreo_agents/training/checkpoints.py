"""Checkpoints of a training run: written atomically, the oldest pruned."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from choreo_agents.models.files import replace_file
from choreo_agents.training.journal import locked

UNREADABLE = (
    OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, UnpicklingError,
)  # fmt: skip
"""Errors that torch raises for a checkpoint that is damaged, or for another file."""
_KEPT = 2
"""How many of the newest checkpoints are kept."""


class Checkpoints:
    """Checkpoints in a directory, numbered by training step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from; None if there is none."""
        return next(reversed(self._all()), None)

    def write(self, number: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove all but the newest few.

        Raises:
            OSError: It cannot be written; earlier ones are kept.
        """
        path = self._folder / f"checkpoint-{number:06}.pt"
        try:
            with replace_file(path) as partial:
                torch.save(state, partial)
                with partial.open("rb+") as file:
                    os.fsync(file.fileno())
        except RuntimeError as error:  # torch's error for a full disk
            raise OSError(f"checkpoint {str(path)!r} cannot be written: {str(error).splitlines()[0]}") from error
        for old in [*self._all()[:-_KEPT], *self._folder.glob("*.partial")]:
            old.unlink()
        return path

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("checkpoint-*.pt"), key=lambda path: (len(path.name), path.name))


def reserved(folder: Path) -> AbstractContextManager[None]:
    """Lock a run's directory: two runs in it would evaluate and resume each other's weights.

    Raises:
        InvalidRequestError: Another run holds the lock.
    """
    return locked(folder / "run.lock", f"another run is using {str(folder)!r}: wait, or pass another folder")
