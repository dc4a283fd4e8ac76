"""Sampling settings of one row of a step, and the exact draw of its token by torch's operators.

A token is drawn by Gumbel-max sampling: of those that filters keep, it has the highest logit / temperature + noise. A
kernel in fp32 decides most rows; this decides those that it leaves, and all rows where there is no kernel.

Everything that decides is the same on any device and for any batch: maxima, comparisons, integers, logarithms of single
numbers, sums of weights that are rounded so that their order does not matter, and functions made of correctly rounded
operations. The last bit of a library's exp depends on the processor, the device, and a number's place in a vector,
which changes with the batch's shape and the number of threads. Sums, differences, products and quotients are rounded
correctly everywhere, if each is an operation of its own. Nothing is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.noise import FIRST_BITS, NoiseKey, first_bits, gumbel
from choreo_agents.sampling.parameters import Sampling

HIGHEST = torch.finfo(torch.float32).max
LOW = -1e38
"""A row whose highest logit is below this may have no finite one."""
LOG2_E = math.log2(math.e)
_EXP2 = (0.0013264727202715709, 0.009671512658650858, 0.05550733743414529, 0.240222420850803, 0.6931469775989691)
"""Coefficients of 2**f = 1 + f * polynomial(f), highest power first, fitted for f from -1/2 to 1/2."""
_ROUND = 1.5 * 2**23
"""Added to a small fp32 number, leaves the nearest integer in its low bits."""
_MANTISSA_BITS = torch.tensor(23, dtype=torch.int32)
_LOWEST = -127.0
"""Exponent at and below which the power of 2 is 0 in fp32."""
_ALIKE = -(2.0**-23)
"""Exponent above which a token's weight equals the highest one. min-p is never above it, so that all such tokens pass,
including the first of them, which every nucleus keeps."""
CHUNK = 128
"""Numbers of a row whose highest is compared with those of others."""
_LEAST_BITS = 2.0**-33
"""Lower bound on uniform numbers, in units of the first bits."""
_MARGIN = 0.01
"""Margin in exponents of 2, far more than the error of fp32 in bounds that only say where to look."""
_SMALLEST = torch.finfo(torch.float32).tiny
_SPARE = 64
"""Tokens for which a new list of counted tokens has room."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """Penalties on some tokens, each once; only these logits are touched, of a vocabulary 100 times larger."""

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
        logits.index_copy_(0, self.words, values.clamp_(-HIGHEST, HIGHEST))


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
        factor = min(max(sampling.repetition_penalty, _SMALLEST), HIGHEST)  # 0 * inf would be NaN
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


def exp2_(exponents: Tensor) -> Tensor:
    """Compute 2 to the power of fp32 numbers <= 0, to a relative 2e-7: exactly 1 for 0, and 0 from -127 down.

    Args:
        exponents: Overwritten.
    """
    exponents.clamp_(min=_LOWEST)
    power = exponents + _ROUND
    exponent_bits = torch.bitwise_left_shift(power.view(torch.int32), _MANTISSA_BITS)
    exponents.sub_(power.sub_(_ROUND))
    torch.mul(exponents, _EXP2[0], out=power)
    for coefficient in _EXP2[1:]:
        power.add_(coefficient).mul_(exponents)
    power.add_(1.0)
    # The integral part is added to the exponent of a number between 0.7 and 1.5.
    power.view(torch.int32).add_(exponent_bits)
    return power


def rounded_for_sums(weights: Tensor) -> Tensor:
    """Return numbers between 0 and 1 as doubles, rounded so that the sum of a row of them is exact in any order."""
    shift = 1.5 * 2.0 ** (weights.shape[-1] - 1).bit_length()
    # A double next to `shift` has 52 bits after its first: lower bits are rounded away.
    return weights.double().add_(shift).sub_(shift)


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
