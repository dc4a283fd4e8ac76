"""Sampling settings of one row of a step, and the rows' logits as they change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.elementary import HIGHEST, LOG2_E, LOW
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

    def numbers(self) -> tuple[float, float, float]:
        """Return the factor from logits to exponents of 2, the least exponent by min-p, and top-p."""
        sampling = self.sampling
        scale = min(max(LOG2_E / sampling.temperature, 2.0**-100), 2.0**100)
        least = min(math.log2(sampling.min_p), _ALIKE) if sampling.min_p else -math.inf
        return scale, least, sampling.top_p


def drawn_rows(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
    """Return a copy of some rows as tokens are drawn from them: fp32, [rows, vocabulary], with masked tokens at -inf.

    NaN counts as the lowest number, and infinities as the lowest or highest.

    Args:
        logits: [all rows, vocabulary].
        rows: The rows.
        draws: Their settings.

    Raises:
        ArithmeticError: A row has no finite logit: the forward pass failed.
    """
    copy = logits[list(rows)].float()
    if not copy.isfinite().any(dim=-1).all():
        raise ArithmeticError("logits are NaN or infinite: the forward pass that computed them failed")
    copy.nan_to_num_(nan=-HIGHEST, posinf=HIGHEST, neginf=-HIGHEST)
    for row, draw in zip(copy, draws, strict=True):
        if draw.penalties is not None:
            draw.penalties.apply_(row)
        if draw.mask is not None:
            row.masked_fill_(~draw.mask, float("-inf"))
    return copy


def drawn_row(logits: Tensor, row: int, draw: Draw) -> Tensor:
    """Return one row as a token is drawn from it, [vocabulary]: itself, if nothing in it has to change."""
    own = logits[row]
    # NaN shows in the highest logit, and -inf below finite logits needs no change.
    if own.dtype == torch.float32 and not draw.changes and LOW < float(own.amax()) <= HIGHEST:
        return own
    return drawn_rows(logits, [row], [draw])[0]
