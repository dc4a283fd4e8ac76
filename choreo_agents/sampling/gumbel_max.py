"""Gumbel-max sampling: the token of a row with the highest logit / temperature + noise, of those that filters keep.

It decides rows that a kernel in fp32 leaves, and all rows where there is no kernel. Everything that decides is the same
on any device: maxima, comparisons, integers, `elementary` functions, logarithms of single numbers, and sums of weights
that are rounded so that their order does not matter. Nothing is sorted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.elementary import exp2_, rounded_for_sums
from choreo_agents.sampling.noise import FIRST_BITS, first_bits, gumbel

CHUNK = 128
"""Numbers of a row whose highest is compared with those of others."""
_LEAST_BITS = 2.0**-33
"""Lower bound on uniform numbers, in units of the first bits."""
_MARGIN = 0.01
"""Margin in exponents of 2, far more than the error of fp32 in bounds that only say where to look."""


def bound_of_highest(row: Tensor, count: int) -> float:
    """Return a number that at least `count` numbers of a row, [words], reach, and few others.

    The peaks of the `count` chunks with the highest peaks reach the lowest of these.
    """
    chunks = len(row) // CHUNK
    if count > chunks:
        return -math.inf
    peaks = row[: chunks * CHUNK].view(chunks, CHUNK).amax(dim=-1)
    return float(peaks.topk(count).values[-1])


def exact_weights(logits: Tensor, top: Tensor, scale: float) -> Tensor:
    """Return each token's probability over the likeliest one's: doubles whose sum over a row is exact."""
    return rounded_for_sums(exp2_((logits - top).mul_(scale)))


def draw_token(row: Tensor, draw: Draw) -> int:
    """Draw the token of a row.

    The winner must be in the nucleus, the fewest likeliest tokens whose probabilities sum to at least top-p. It is if
    all tokens before it (likelier, or as likely with a lower id) make up less than top-p. This is checked for winners
    only: a winner outside is ruled out with all tokens after it, and the next one is found.

    Args:
        row: [vocabulary], fp32; see `drawn_row`.
        draw: Its settings.
    """
    sampling = draw.sampling
    if sampling.temperature == 0.0:
        return int(row.argmax())
    ids = torch.arange(len(row), dtype=torch.int32, device=row.device)
    if 0 < sampling.top_k < len(row):
        near = (row >= bound_of_highest(row, sampling.top_k)).nonzero()[:, 0]
        row, ids = row[near], ids[near]
        kept = row >= row.topk(sampling.top_k).values[-1]
        row, ids = row[kept], ids[kept]
    scale, least, top_p = draw.numbers()
    top = row.max()
    exponents = (row - top).mul_(scale)
    bits = first_bits(ids, draw.noise)
    # A score is log2(weight / E), with E = -ln(1 - u) of the token's uniform number u. E >= u >= its first bits.
    bounds = exponents - bits.float().clamp_(min=_LEAST_BITS).log2_()
    bounds.masked_fill_(exponents < least, float("-inf"))
    winner = _find_highest(row, ids, draw, exponents, bits, bounds)
    if top_p == 1.0:
        return int(ids[winner])
    weights = exact_weights(row, top, scale)
    enough = top_p * float(weights.sum())
    while True:
        is_before = (weights > weights[winner]) | ((weights == weights[winner]) & (ids < ids[winner]))
        if float(torch.where(is_before, weights, 0.0).sum()) < enough:
            return int(ids[winner])
        bounds.masked_fill_(~is_before, float("-inf"))
        winner = _find_highest(row, ids, draw, exponents, bits, bounds)


def _find_highest(row: Tensor, ids: Tensor, draw: Draw, exponents: Tensor, bits: Tensor, bounds: Tensor) -> int:
    """Return the index of the token with the highest score; of equal ones, the first.

    Only tokens that can be the highest are scored.

    Args:
        row: [tokens], as are all tensors.
        ids: Their ids, ascending.
        draw: Its settings.
        exponents: Logarithm, to base 2, of each token's probability over the likeliest one's.
        bits: First bits of each token's uniform number.
        bounds: Upper bound on each token's score, in exponents of 2 of units of these bits; -inf for those ruled out.
    """
    likely = int(bounds.argmax())
    uniform = min((int(bits[likely]) + 1) * 2.0**-FIRST_BITS, 1.0 - 2.0**-53)
    reached = float(exponents[likely]) - math.log2(-math.log1p(-uniform)) - FIRST_BITS
    near = (bounds >= reached - _MARGIN).nonzero()[:, 0]
    assert len(near), "a row must have a token that may win"
    top = float(row.max())
    scores: list[tuple[float, int]] = [
        ((logit - top) / draw.sampling.temperature + gumbel(token, draw.noise), -place)
        for place, token, logit in zip(near.tolist(), ids[near].tolist(), row[near].tolist(), strict=True)
    ]
    return -max(scores)[1]
