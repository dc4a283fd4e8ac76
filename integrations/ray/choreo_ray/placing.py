"""Resources that engines in actors ask of a cluster, and their placement."""

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
"""Strategy of a Ray placement group."""


def absolute(path: str | Path | None) -> str | Path | None:
    """Make a directory's path absolute, since actors have another working directory; other names stay as they are."""
    return Path(path).absolute() if path is not None and Path(path).is_dir() else path


def with_absolute(memory: Memory | None) -> Memory | None:
    """Make directories absolute, since actors have another working directory; missing ones are created there later."""
    if memory is None:
        return None
    folders = {"disk": memory.disk, "persist_dir": memory.persist_dir}
    return memory.model_copy(update={name: path and path.absolute() for name, path in folders.items()})


@dataclass(frozen=True)
class Placing:
    """Resources and placement that actors ask of the cluster."""

    engines: int
    num_cpus: float
    num_gpus: float
    """Resources of each engine."""
    placement: Strategy | PlacementGroup | None
    """Strategy of a new placement group, or a placement group that has a bundle for each; None: no group."""
    name: str | None
    """Name of actors that outlive this process, by which others find them; None: they end with it."""
    namespace: str
    start_s: float
    """Seconds within which they have to be scheduled and begin."""

    def __post_init__(self) -> None:
        if isinstance(self.engines, bool) or not isinstance(self.engines, int) or self.engines < 1:
            raise InvalidRequestError(f"engines must be an integer of at least 1, not {self.engines!r}")
        for field in ("num_cpus", "num_gpus", "start_s"):
            _require_number(field, getattr(self, field))
        if not self.start_s:
            raise InvalidRequestError("start_s must be positive, not 0")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise InvalidRequestError(f"num_gpus above 1 must be an integer, not {self.num_gpus!r}")
        require_name(self.name, self.namespace)
        if isinstance(self.placement, str) and self.placement not in get_args(Strategy):
            strategies = ", ".join(map(repr, get_args(Strategy)))
            raise InvalidRequestError(
                f"placement must be one of {strategies}, a placement group or None, not {self.placement!r}"
            )
        if self.name is not None and self.placement is not None:
            raise InvalidRequestError("named actors outlive the placement group: leave name or placement out")

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one engine, by Ray's names."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}

    def names(self) -> list[str]:
        """Return the names of the engines."""
        return [engine_name(self.name, number) for number in range(self.engines)]


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}")
    if value < 0:
        raise InvalidRequestError(f"{name} must not be negative, not {value!r}")
