"""Whether a synthesizer reads boundaries: behind each branch, the opening of a next turn, encoded when it is merged.

In an ordinary prompt the first token of a turn has seen the turn before it, and a model may have come to look there for
what was said last. In a worker's cache nothing follows the branch, so that its last sentence is easily missed.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from choreo_agents.errors import AdapterError
from choreo_agents.models.files import write_text

MERGING_FILE = "merging.json"


class MergingConfig(BaseModel):
    """What a synthesizer's adapter and mapper were trained to read. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boundaries: bool = False


def write_merging(folder: Path, config: MergingConfig) -> None:
    """Write it beside the adapter.

    Raises:
        OSError: It cannot be written.
    """
    write_text(folder / MERGING_FILE, config.model_dump_json() + "\n")


def read_merging(folder: Path) -> MergingConfig:
    """What a folder says; without a file, nothing special.

    Raises:
        AdapterError: The file is damaged, or of a later version.
    """
    path = folder / MERGING_FILE
    try:
        return MergingConfig.model_validate_json(path.read_bytes()) if path.exists() else MergingConfig()
    except (OSError, ValidationError) as error:
        raise AdapterError(f"{str(path)!r} does not say how branches are merged: train again, or remove it") from error
