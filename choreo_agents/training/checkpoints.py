"""Checkpoints of a training run: written whole or not at all, the oldest pruned."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from choreo_agents.models.files import put
from choreo_agents.training.journal import locked

UNREADABLE = (
    OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, UnpicklingError,
)  # fmt: skip
"""What comes of a checkpoint that is damaged, or another file: torch says it in all these ways."""


class Checkpoints:
    """The checkpoints in a folder, numbered by how far the run had come."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def newest(self) -> Path | None:
        """The checkpoint to resume from; None if there is none."""
        found = self._all()
        return found[-1] if found else None

    def write(self, number: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove all but the newest few.

        Raises:
            OSError: It cannot be written; those before it are left.
        """
        path = self._folder / f"checkpoint-{number:06}.pt"
        try:
            with put(path) as partial:
                torch.save(state, partial)
                with partial.open("rb+") as file:
                    os.fsync(file.fileno())
        except RuntimeError as error:  # what a full disk is to torch
            raise OSError(f"checkpoint {str(path)!r} cannot be written: {str(error).splitlines()[0]}") from error
        for old in [*self._all()[: -self._keep], *self._folder.glob("*.partial")]:
            old.unlink()
        return path

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("checkpoint-*.pt"), key=lambda path: (len(path.name), path.name))


def reserved(folder: Path) -> AbstractContextManager[None]:
    """Keep a run's folder from other runs: two of them would judge and resume each other's weights.

    Raises:
        InvalidRequestError: Another run is at it.
    """
    return locked(folder / "run.lock", f"another run is at work in {str(folder)!r}: wait, or name another folder")
