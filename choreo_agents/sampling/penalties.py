"""What tokens that were there take from the logits of their words.

Only words that were there are touched: a view holds some thousands, a vocabulary hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.parameters import Sampling

_ROOM = 64
_LOWEST, _HIGHEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Penalties:
    """Of some words, each once."""

    words: Tensor
    """int64, [words]."""
    factor: Tensor
    """By what their logits are divided if they are positive, and multiplied otherwise: fp32, [1]."""
    losses: Tensor
    """What they lose then: fp32, [words]."""

    def apply_(self, logits: Tensor) -> None:
        """Change a row of fp32 logits, all of them finite: [vocabulary]. They stay so."""
        found = logits.index_select(0, self.words)
        # Each operation is rounded by itself: a fused one would round otherwise where it stands elsewhere in a vector.
        found = torch.where(found > 0.0, found / self.factor, found * self.factor).sub_(self.losses)
        logits.index_copy_(0, self.words, found.clamp_(-_HIGHEST, _HIGHEST))


class CountedTokens:
    """The tokens of one request, counted as they come.

    A logit is divided or multiplied by `repetition_penalty` if its word was ever there, and loses `presence_penalty`
    then, and `frequency_penalty` for each time, if it was sampled: as in vLLM.

    Args:
        sampling: Says what they cost.
        before: Tokens before those that are sampled.
        device: Of the logits.
    """

    def __init__(self, sampling: Sampling, before: Iterable[int], device: torch.device) -> None:
        self._sampling = sampling
        self._places = {word: place for place, word in enumerate(dict.fromkeys(before))}
        self._times: dict[int, int] = {}
        factor = min(max(sampling.repetition_penalty, _LOWEST), _HIGHEST)  # 0 by infinity would be no number
        self._factor = torch.tensor([factor], dtype=torch.float32, device=device)
        # With room for some more; it grows by doubling.
        self._words = torch.tensor([*self._places, *[0] * _ROOM], device=device)
        self._losses = torch.zeros(len(self._words), dtype=torch.float32, device=device)

    def add(self, token: int) -> None:
        """Count one that was sampled."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._words):
            self._words, self._losses = (torch.cat([each, each]) for each in (self._words, self._losses))
        times = self._times[token] = self._times.get(token, 0) + 1
        self._words[place] = token
        self._losses[place] = self._sampling.presence_penalty + self._sampling.frequency_penalty * times

    def penalties(self) -> Penalties | None:
        """What they cost until the next is counted; None if nothing was there."""
        count = len(self._places)
        return Penalties(self._words[:count], self._factor, self._losses[:count]) if count else None
