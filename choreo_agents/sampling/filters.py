"""Filters on the logits of one request."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the `k` highest of [vocabulary] logits to -inf; ties with the k-th stay."""
    if not 0 < k < len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest of the likeliest tokens whose probabilities sum to at least `p`; always the likeliest."""
    if p >= 1.0:
        return logits
    order = logits.argsort(descending=True)
    probabilities = logits[order].softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return logits.index_fill(0, order[before >= p], float("-inf"))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep what is at least `p` times as likely as the likeliest token; always the likeliest."""
    if p <= 0.0:
        return logits
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.max(), float("-inf"))


def penalise(logits: Tensor, tokens: Iterable[int], penalty: float) -> Tensor:
    """Make tokens less likely (penalty above 1) or likelier: positive logits are divided by it, others multiplied.

    Each token once, however often it is named: the repetition penalty of CTRL, as Hugging Face applies it.
    """
    named = torch.tensor(sorted(set(tokens)), dtype=torch.long, device=logits.device)
    if penalty == 1.0 or not len(named):
        return logits
    theirs = logits[named]
    return logits.index_copy(0, named, torch.where(theirs > 0, theirs / penalty, theirs * penalty))


def apply_filters(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Temperature, then top-k, top-p and min-p, as Hugging Face orders them. Takes [vocabulary], returns it in fp64.

    The highest logit becomes 0 first: a temperature near 0 then sends the others to -inf instead of all to inf.
    """
    wide = logits.to(torch.float64)
    return keep_min_p(keep_top_p(keep_top_k((wide - wide.max()) / temperature, top_k), top_p), min_p)
