"""Filters on the logits of one request."""

from __future__ import annotations

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


def apply_filters(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then top-k, then top-p, as Hugging Face orders them. Takes [vocabulary], returns it in fp64.

    The highest logit becomes 0 first: a temperature near 0 then sends the others to -inf instead of all to inf.
    """
    wide = logits.to(torch.float64)
    return keep_top_p(keep_top_k((wide - wide.max()) / temperature, top_k), top_p)
