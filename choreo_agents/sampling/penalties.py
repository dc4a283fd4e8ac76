"""Penalties on the logits of tokens that were read or sampled before.

Only these tokens are touched: a view holds some thousands, a vocabulary hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.parameters import Sampling

_SPARE = 64
_LOWEST, _HIGHEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Penalties:
    """Penalties on some tokens, each once."""

    words: Tensor
    """Token ids: int64, [words]."""
    factor: Tensor
    """Divisor of positive logits and factor of others: fp32, [1]."""
    losses: Tensor
    """Subtracted from the logits afterwards: fp32, [words]."""

    def apply_(self, logits: Tensor) -> None:
        """Apply the penalties to a row of finite fp32 logits, [vocabulary], in place; they stay finite."""
        values = logits.index_select(0, self.words)
        # Separate operations: rounding of a fused one could depend on a number's place in a vector.
        values = torch.where(values > 0.0, values / self.factor, values * self.factor).sub_(self.losses)
        logits.index_copy_(0, self.words, values.clamp_(-_HIGHEST, _HIGHEST))


class CountedTokens:
    """Token counts of one request, from which its penalties follow.

    As in vLLM: the logit of a token that was read or sampled is divided or multiplied by `repetition_penalty`; that of
    a sampled token loses `presence_penalty`, and `frequency_penalty` for each time.

    Args:
        sampling: Sampling parameters with the penalties.
        before: Tokens before the answer.
        device: Device of the logits.
    """

    def __init__(self, sampling: Sampling, before: Iterable[int], device: torch.device) -> None:
        self._sampling = sampling
        self._places = {word: place for place, word in enumerate(dict.fromkeys(before))}
        self._times: dict[int, int] = {}
        factor = min(max(sampling.repetition_penalty, _LOWEST), _HIGHEST)  # 0 * inf would be NaN
        self._factor = torch.tensor([factor], dtype=torch.float32, device=device)
        # With spare capacity, which doubles when it is used up.
        self._words = torch.tensor([*self._places, *[0] * _SPARE], device=device)
        self._losses = torch.zeros(len(self._words), dtype=torch.float32, device=device)

    def add(self, token: int) -> None:
        """Count a sampled token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._words):
            self._words, self._losses = (torch.cat([tensor, tensor]) for tensor in (self._words, self._losses))
        times = self._times[token] = self._times.get(token, 0) + 1
        self._words[place] = token
        self._losses[place] = self._sampling.presence_penalty + self._sampling.frequency_penalty * times

    def penalties(self) -> Penalties | None:
        """Return the current penalties; None if there are no tokens. Valid until the next `add`."""
        count = len(self._places)
        return Penalties(self._words[:count], self._factor, self._losses[:count]) if count else None
