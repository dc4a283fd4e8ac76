"""One request's choice of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.sampling.filters import apply_filters
from choreo_agents.sampling.parameters import Sampling


class TokenSampler:
    """Chooses the tokens of one request from its own random numbers.

    The choice is the argmax of logits plus Gumbel noise: a sample from the softmax that a last-bit change of the
    logits (another batch shape) leaves as it is unless two tokens are all but tied.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._chosen = 0

    def choose(self, logits: Tensor) -> int:
        """The next token for [vocabulary] logits."""
        sampling, step = self.sampling, self._chosen
        self._chosen += 1
        if sampling.forced is not None:
            return sampling.forced[step]
        if sampling.temperature == 0.0:
            return int(logits.argmax())
        kept = apply_filters(logits.cpu(), sampling.temperature, sampling.top_k, sampling.top_p)
        uniform = torch.rand(kept.shape, generator=self._generator, dtype=torch.float64)
        noise = -(-(uniform.clamp_min(1e-300)).log()).log()
        return int((kept + noise).argmax())
