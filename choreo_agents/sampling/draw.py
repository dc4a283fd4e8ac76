"""What rows of a step ask for."""

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
"""Words whose exponents lie above it have the weight of the highest: all of them pass min-p, so that the first of them,
which every nucleus keeps, does."""


@dataclass(frozen=True, eq=False)
class Draw:
    """What one row asks for."""

    sampling: Sampling
    noise: NoiseKey = (0, 0, 0, 0)
    """Of nothing if the temperature is 0."""
    mask: Tensor | None = None
    """Which words may be chosen, one of them at least: bool, [vocabulary]. None: any."""
    penalties: Penalties | None = None
    """Come before the mask. None: none."""

    @property
    def changes(self) -> bool:
        """Whether the row's logits are others than the model's."""
        return self.penalties is not None or self.mask is not None


@dataclass(frozen=True)
class DrawColumns:
    """What some rows ask for, as columns."""

    draws: Sequence[Draw]
    scale: Tensor
    """From logits to exponents of 2: fp32, [rows, 1]."""
    top_p: Tensor | None
    """Doubles, [rows, 1]; None if no row has one."""
    least: Tensor | None
    """The exponents that min-p asks for, likewise, in fp32."""

    @staticmethod
    def by(draws: Sequence[Draw], device: torch.device) -> DrawColumns:
        """What these ask for, on a device."""
        wanted = [draw.sampling for draw in draws]
        columns = torch.tensor([numbers(each) for each in wanted], dtype=torch.float64).to(device)
        scales, least_exponents, top_p = columns.T[..., None]
        return DrawColumns(
            draws,
            scales.to(torch.float32),
            top_p if any(each.top_p < 1.0 for each in wanted) else None,
            least_exponents.to(torch.float32) if any(each.min_p for each in wanted) else None,
        )

    def of(self, rows: Sequence[int]) -> DrawColumns:
        """What some of the rows ask for."""
        where = slice(rows[0], rows[-1] + 1) if are_in_a_row(rows) else list(rows)
        top_p, least = (None if column is None else column[where] for column in (self.top_p, self.least))
        return DrawColumns([self.draws[row] for row in rows], self.scale[where], top_p, least)


def numbers(sampling: Sampling) -> tuple[float, float, float]:
    """From logits to exponents of 2; the exponent that min-p asks for; top-p."""
    scale = min(max(LOG2_E / sampling.temperature, 2.0**-100), 2.0**100)
    return scale, min(math.log2(sampling.min_p), _ALIKE) if sampling.min_p else -math.inf, sampling.top_p


def are_in_a_row(rows: Sequence[int]) -> bool:
    """Whether each comes right after the one before it: then they are a slice."""
    return all(row == rows[0] + place for place, row in enumerate(rows))
