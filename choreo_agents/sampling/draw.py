"""Sampling settings of one row of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def numbers(self) -> tuple[float, float, float]:
        """Return the factor from logits to exponents of 2, the least exponent by min-p, and top-p."""
        sampling = self.sampling
        scale = min(max(LOG2_E / sampling.temperature, 2.0**-100), 2.0**100)
        least = min(math.log2(sampling.min_p), _ALIKE) if sampling.min_p else -math.inf
        return scale, least, sampling.top_p
