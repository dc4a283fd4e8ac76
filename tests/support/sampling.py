"""How one row's token is chosen, slowly: in doubles, with every word sorted and scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from choreo_agents.sampling import Sampling
from choreo_agents.sampling.noise import noise_key

_LOWEST = -float(torch.finfo(torch.float32).max)


def noise(seed: int, step: int, word: int) -> float:
    """Gumbel noise: 63 bits of two hashes, and half a unit, are a uniform number."""
    one, two, three, four = (key % 2**32 for key in noise_key(seed, step))
    uniform = ((_hash(word, one, two) % 2**31) * 2**32 + _hash(word, three, four) + 0.5) / 2**63
    return -math.log(-math.log1p(-uniform)) if uniform < 1 else math.inf


def _hash(word: int, key: int, later: int) -> int:
    bits = (word + key) % 2**32
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32 ^ later
    bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
    return bits ^ bits >> 16


def drawn_from(
    logits: Tensor,
    sampling: Sampling,
    before: Sequence[int] = (),
    sampled: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> Tensor:
    """A row's logits as the tokens that were there leave them, with what is not allowed at -inf, in doubles."""
    row = logits.float().nan_to_num(nan=_LOWEST, posinf=-_LOWEST, neginf=_LOWEST)
    for word in {*before, *sampled}:
        penalty = sampling.repetition_penalty
        row[word] = row[word] / penalty if row[word] > 0 else row[word] * penalty
    for word in set(sampled):
        row[word] -= sampling.presence_penalty + sampling.frequency_penalty * sampled.count(word)
    row = row.clamp(_LOWEST, -_LOWEST)
    if allowed is not None:
        banned = torch.ones(len(row), dtype=torch.bool)
        banned[list(allowed)] = False
        row[banned] = float("-inf")
    return row.double()


def probabilities(row: Tensor, sampling: Sampling) -> tuple[Tensor, float]:
    """What each word is drawn with, and how near a filter's edge is: the least relative distance of a word from one."""
    scaled = (row - row.max()) / sampling.temperature
    edge = math.inf
    if 0 < sampling.top_k < len(row):
        kth = row.sort(descending=True).values[sampling.top_k - 1]
        scaled = scaled.masked_fill(row < kth, float("-inf"))
    chances = scaled.softmax(-1)
    kept = chances > 0
    if sampling.top_p < 1.0:
        order = chances.sort(descending=True, stable=True).indices
        before = chances[order].cumsum(0) - chances[order]
        edge = float((before - sampling.top_p).abs().min())
        kept = torch.zeros_like(kept).index_fill(0, order[before < sampling.top_p], True)
    if sampling.min_p > 0.0:
        share = chances / chances.max()
        below = share != 1.0
        if below.any():
            edge = min(edge, float((share[below] / sampling.min_p - 1.0).abs().min()))
        kept &= share >= sampling.min_p
    chances = chances.masked_fill(~kept, 0.0)
    return chances / chances.sum(), edge


def choice(row: Tensor, sampling: Sampling, seed: int, step: int) -> int:
    """The token; of equal ones the first."""
    if sampling.temperature == 0.0:
        return int(row.argmax())
    chances, _ = probabilities(row, sampling)
    scaled = ((row - row.max()) / sampling.temperature).tolist()
    scores = [
        (x + noise(seed, step, word), -word) if chances[word] > 0 else (-math.inf, -word)
        for word, x in enumerate(scaled)
    ]
    return -max(scores)[1]
