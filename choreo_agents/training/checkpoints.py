"""Checkpoints of a training run: written whole or not at all, the oldest pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"checkpoint-{number:06}.pt"
        partial = path.with_suffix(".partial")
        try:
            torch.save(state, partial)
        except RuntimeError as error:  # what a full disk is to torch
            raise OSError(f"checkpoint {str(partial)!r} cannot be written: {str(error).splitlines()[0]}") from error
        partial.replace(path)
        for old in [*self._all()[: -self._keep], *self._folder.glob("*.partial")]:
            old.unlink()
        return path

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("checkpoint-*.pt"))
