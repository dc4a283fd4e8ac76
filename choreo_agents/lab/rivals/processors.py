"""How transformers chooses the tokens of a batch: its processors, a softmax, and torch's multinomial."""

from __future__ import annotations

from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from choreo_agents.sampling import Sampling


class Processors:
    """What `generate` makes of a sampling, in its order. It knows no presence and no frequency."""

    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0.0
        self._all = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._all.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if self._greedy:
            return
        if sampling.temperature != 1.0:
            self._all.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._all.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._all.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._all.append(MinPLogitsWarper(sampling.min_p))

    def scores(self, before: Tensor, logits: Tensor) -> Tensor:
        """[rows, vocabulary] logits after tokens [rows, n]: -inf where the filters leave nothing."""
        found: Tensor = self._all(before, logits)
        return found

    def choose(self, before: Tensor, logits: Tensor) -> Tensor:
        """A token for each row."""
        scores = self.scores(before, logits)
        return scores.argmax(dim=-1) if self._greedy else scores.softmax(dim=-1).multinomial(1)[:, 0]
