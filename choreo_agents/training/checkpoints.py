"""The checkpoint of a training run, one file that is replaced atomically, and the lock of its directory."""

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


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint in the place of an earlier one.

    Raises:
        OSError: It cannot be written; the earlier one is kept.
    """
    try:
        with replace_file(path) as partial:
            torch.save(state, partial)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
    except RuntimeError as error:  # torch's error for a full disk
        raise OSError(f"checkpoint {str(path)!r} cannot be written: {str(error).splitlines()[0]}") from error


def reserved(folder: Path) -> AbstractContextManager[None]:
    """Lock a run's directory: two runs in it would evaluate and resume each other's weights.

    Raises:
        InvalidRequestError: Another run holds the lock.
    """
    return locked(folder / "run.lock", f"another run is using {str(folder)!r}: wait, or pass another folder")
