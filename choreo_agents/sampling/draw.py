"""Sampling settings of the rows of a step: as objects, and as columns of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.elementary import LOG2_E
from choreo_agents.sampling.noise import NoiseKey
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.penalties import Penalties

_ALIKE = -(2.0**-23)
"""Exponent above which a token's weight equals the highest one. min-p is never above it, so that all such tokens pass,
including the first of them, which every nucleus keeps."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Sampling settings of one row."""

    sampling: Sampling
    noise: NoiseKey = (0, 0, 0, 0)
    """Key of the row's random numbers; unused at temperature 0."""
    mask: Tensor | None = None
    """Tokens that may be chosen, at least one: bool, [vocabulary]. None: any."""
    penalties: Penalties | None = None
    """Penalties, applied before the mask. None: none."""

    @property
    def changes(self) -> bool:
        """True if penalties or a mask change the row's logits."""
        return self.penalties is not None or self.mask is not None


@dataclass(frozen=True)
class DrawColumns:
    """Sampling settings of some rows, as columns."""

    draws: Sequence[Draw]
    scale: Tensor
    """Factor from logits to exponents of 2: fp32, [rows, 1]."""
    top_p: Tensor | None
    """top-p as doubles, [rows, 1]; None if no row has one."""
    least: Tensor | None
    """Least exponents by min-p, [rows, 1] fp32; None if no row has one."""

    @staticmethod
    def by(draws: Sequence[Draw], device: torch.device) -> DrawColumns:
        """Make the columns of some draws on a device."""
        samplings = [draw.sampling for draw in draws]
        columns = torch.tensor([numbers(sampling) for sampling in samplings], dtype=torch.float64).to(device)
        scales, least_exponents, top_p = columns.T[..., None]
        return DrawColumns(
            draws,
            scales.to(torch.float32),
            top_p if any(sampling.top_p < 1.0 for sampling in samplings) else None,
            least_exponents.to(torch.float32) if any(sampling.min_p for sampling in samplings) else None,
        )

    def of(self, rows: Sequence[int]) -> DrawColumns:
        """Return the columns of some of the rows."""
        where = slice(rows[0], rows[-1] + 1) if are_in_a_row(rows) else list(rows)
        top_p, least = (None if column is None else column[where] for column in (self.top_p, self.least))
        return DrawColumns([self.draws[row] for row in rows], self.scale[where], top_p, least)


def numbers(sampling: Sampling) -> tuple[float, float, float]:
    """Return the factor from logits to exponents of 2, the least exponent by min-p, and top-p."""
    scale = min(max(LOG2_E / sampling.temperature, 2.0**-100), 2.0**100)
    return scale, min(math.log2(sampling.min_p), _ALIKE) if sampling.min_p else -math.inf, sampling.top_p


def are_in_a_row(rows: Sequence[int]) -> bool:
    """Return whether rows are consecutive, so that a slice selects them."""
    return all(row == rows[0] + place for place, row in enumerate(rows))
