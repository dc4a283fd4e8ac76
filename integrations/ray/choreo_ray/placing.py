"""What engines in actors ask of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ray.util.placement_group import PlacementGroup

from choreo_agents import Memory
from choreo_agents.errors import InvalidRequestError
from choreo_ray.naming import engine_name, require_name

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Of Ray's placement groups."""


def absolute(path: str | Path | None) -> str | Path | None:
    """A folder as actors find it, too, whose own folder is another: names of no folder here stay as they are."""
    return Path(path).absolute() if path is not None and Path(path).is_dir() else path


def with_folders(memory: Memory | None) -> Memory | None:
    """With folders as actors find them, too; those that are not there yet are made where this process would."""
    if memory is None:
        return None
    folders = {"disk": memory.disk, "kept": memory.persist_dir}
    return memory.model_copy(update={name: path and path.absolute() for name, path in folders.items()})


@dataclass(frozen=True)
class Placing:
    """What actors ask of the cluster."""

    engines: int
    num_cpus: float
    num_gpus: float
    """Of each."""
    placement: Strategy | PlacementGroup | None
    """How they lie in a placement group that is made for them, or one that has a bundle for each; None: in none."""
    name: str | None
    """Of actors that outlive this process, and that others find by it; None: they end with it."""
    namespace: str
    start_s: float
    """Seconds in which they have to have found room, and begun."""

    def __post_init__(self) -> None:
        if isinstance(self.engines, bool) or not isinstance(self.engines, int) or self.engines < 1:
            raise InvalidRequestError(f"engines must be a whole number, at least 1, not {self.engines!r}")
        for what in ("num_cpus", "num_gpus", "start_s"):
            _require_number(what, getattr(self, what))
        if not self.start_s:
            raise InvalidRequestError("start_s must be positive, not 0")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise InvalidRequestError(f"num_gpus must be whole if it is more than 1, not {self.num_gpus!r}")
        require_name(self.name, self.namespace)
        if isinstance(self.placement, str) and self.placement not in get_args(Strategy):
            ways = ", ".join(map(repr, get_args(Strategy)))
            raise InvalidRequestError(
                f"placement must be one of {ways}, a placement group or None, not {self.placement!r}"
            )
        if self.name is not None and self.placement is not None:
            raise InvalidRequestError("actors with a name outlive the placement group: leave name or placement out")

    @property
    def bundle(self) -> dict[str, float]:
        """Of one engine."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}

    def names(self) -> list[str]:
        """Of the engines."""
        return [engine_name(self.name, number) for number in range(self.engines)]


def _require_number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{what} must be a number, not {value!r}")
    if value < 0:
        raise InvalidRequestError(f"{what} must not be negative, but it is {value!r}")
