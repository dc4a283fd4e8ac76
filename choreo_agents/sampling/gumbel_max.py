"""Gumbel-max sampling: the token of a row with the highest logit / temperature + noise, of those that filters keep.

Noise of all tokens is expensive, and a row has one winner. The first bits of a token's uniform number bound its score,
and only the few tokens that can be the highest are scored.

A winner must be in the nucleus, the fewest likeliest tokens whose probabilities sum to at least top-p. It is if all
tokens before it (likelier, or as likely with a lower id) make up less than top-p. This is checked for winners only, and
nothing is sorted: a winner outside is ruled out, and the next one is found. Quick sums in fp32 decide it, except for
tokens at the very edge, for which it is computed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.elementary import exp2_, rounded_for_sums_
from choreo_agents.sampling.likeliest import CHUNK, highest, in_chunks, peaks, words_of
from choreo_agents.sampling.noise import FIRST_BITS, first_bits, gumbel
from choreo_agents.sampling.rows import Workspace

_LEAST_BITS = 2.0**-33
"""Lower bound on uniform numbers, in units of the first bits."""
_EXPONENT_BIAS = 127
_EXPONENT_MARGIN = 0.01
"""Margin in exponents of 2, far more than the error of fp32 in bounds that only say where to look."""
_MARGIN = 1e-3
"""Relative margin of sums: two-level sums of 2**18 numbers lose less than a tenth of it in any order."""
_ALIKE = 1e-5
"""Relative margin of weights: closer ones may be equal, or in another order, when computed exactly."""
_LEAST = 2.0**-30
"""Absolute margin of weights: exact ones are multiples of less."""


class Columns(NamedTuple):
    """Sampling settings of some rows, as columns on a device."""

    scale: Tensor
    """Factor from logits to exponents of 2: fp32, [rows, 1]."""
    top_p: Tensor | None
    """top-p as doubles, [rows, 1]; None if no row has one."""
    least: Tensor | None
    """Least exponents by min-p, [rows, 1] fp32; None if no row has one."""

    @staticmethod
    def of(draws: Sequence[Draw], device: torch.device) -> Columns:
        """Make the columns of some draws on a device."""
        columns = torch.tensor([draw.numbers() for draw in draws], dtype=torch.float64).to(device)
        scale, least, top_p = columns.T[..., None]
        return Columns(
            scale.to(torch.float32),
            top_p if any(draw.sampling.top_p < 1.0 for draw in draws) else None,
            least.to(torch.float32) if any(draw.sampling.min_p for draw in draws) else None,
        )


def sums(weights: Tensor) -> Tensor:
    """Sum [rows, words] to [rows, 1], in two levels, so that rounding errors stay small."""
    return weights.view(len(weights), -1, CHUNK).sum(dim=-1).sum(dim=-1, keepdim=True)


def surely_reached(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the weight at which a nucleus is certainly complete, for an approximate total: [rows, 1]."""
    return torch.where(top_p < 1.0, top_p * total * (1.0 + _MARGIN), float("inf"))


def exact_weights(logits: Tensor, top: Tensor, scale: Tensor | float, work: Workspace) -> Tensor:
    """Return each token's probability over the likeliest one's: doubles with exact sums, valid until the next call."""
    exponents = torch.sub(logits, top, out=work.like("spare", logits)).mul_(scale)
    weights = exp2_(exponents, work.like("floats", logits), work.like("spare_bits", logits))
    return rounded_for_sums_(work.like("exact", logits).copy_(weights), work.width)


class GumbelMax:
    """Draw for some rows, from candidates [rows, words]; `words` is a multiple of a chunk.

    Args:
        work: Lends memory, until the winners are known.
        draws: Sampling settings of the rows.
        logits: Logits of the candidates; -inf for padding and tokens that may not win.
        ids: Token ids of the candidates, int32: [words], or [rows, words].
        top: Highest logit of each row: [rows, 1].
        whole: Returns all logits of a row, [1, n], and their token ids, int32, [n]; None: the candidates are all that
            can be in a nucleus.
        total: Approximate sum of all weights of each row: fp32, [rows, 1].
    """

    def __init__(
        self,
        work: Workspace,
        draws: Sequence[Draw],
        logits: Tensor,
        ids: Tensor,
        top: Tensor,
        whole: Callable[[int], tuple[Tensor, Tensor]] | None = None,
        total: Tensor | None = None,
    ) -> None:
        self._work, self._draws, self._logits, self._ids, self._top = work, draws, logits, ids, top
        self._whole = whole
        self._columns = columns = Columns.of(draws, work.device)
        self._exponents = torch.sub(logits, top, out=work.like("exponents", logits)).mul_(columns.scale)
        if columns.top_p is not None:
            self._weights = torch.exp2(self._exponents, out=work.like("weights", logits))
            """Approximate probability of each candidate over the likeliest one's."""
            self._total = sums(self._weights) if total is None else total

    def winners(self) -> list[int]:
        """Return the winning token of each row."""
        work, logits = self._work, self._logits
        keys = torch.tensor([draw.noise for draw in self._draws], dtype=torch.int32).to(logits.device)
        bits = first_bits(self._ids, keys, work.like("bits", logits), work.like("spare_bits", logits))
        bounds = self._bounds(bits)
        if self._columns.least is not None:
            bounds.masked_fill_(self._exponents < self._columns.least, float("-inf"))
        while True:
            winners = self._highest(bounds, bits)
            if self._columns.top_p is None or not self._rule_out(bounds, [place for _, place in winners]):
                return [word for word, _ in winners]

    def _bounds(self, bits: Tensor) -> Tensor:
        """Return an upper bound on each candidate's score, as an exponent of 2.

        A score is ln(weight / E), with E = -ln(1 - u) of the token's uniform number u. E >= u, u >= its first bits, and
        log2 of a float is at least what its bits say when they are read as an integer.
        """
        bounds, floats = self._work.like("bounds", bits), self._work.like("floats", bits)
        floats.copy_(bits).clamp_(min=_LEAST_BITS)
        bounds.copy_(floats.view(torch.int32))
        return torch.sub(self._exponents, bounds, alpha=2.0**-23, out=bounds)

    def _highest(self, bounds: Tensor, bits: Tensor) -> list[tuple[int, int]]:
        """Return the token with the highest score in each row, and its index; scores only those that can be highest."""
        tops, exponents, draws = peaks(bounds), self._exponents, self._draws
        first = highest(bounds, tops)
        uniform = (bits.gather(1, first).to(torch.float64) + 1.0) * 2.0**-FIRST_BITS
        energy = -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-53))
        surely = exponents.gather(1, first) - torch.log2(energy) - (FIRST_BITS + _EXPONENT_BIAS + _EXPONENT_MARGIN)
        chunks = tops.topk(int((tops >= surely).sum(dim=-1).amax()), sorted=False).indices
        near = in_chunks(bounds, chunks)
        rows, places = ((near >= surely) & (near > float("-inf"))).nonzero(as_tuple=True)
        places = words_of(chunks)[rows, places]
        ids = self._ids[places] if self._ids.ndim == 1 else self._ids[rows, places]
        best = [(float("-inf"), 1, 0)] * len(bounds)
        highs = self._top[:, 0].tolist()
        lists = (tensor.tolist() for tensor in (rows, ids, places, self._logits[rows, places]))
        for row, word, place, logit in zip(*lists, strict=True):
            score = (logit - highs[row]) / draws[row].sampling.temperature + gumbel(word, draws[row].noise)
            best[row] = max(best[row], (score, -word, place))
        assert all(score > float("-inf") for score, _, _ in best), "a row must have a word that may win"
        return [(-word, place) for _, word, place in best]

    def _rule_out(self, bounds: Tensor, places: Sequence[int]) -> bool:
        """Rule out winners, at index `places` of each row, that are outside the nucleus; return whether any is.

        The `bounds`, [rows, words], of such a winner and of all tokens after it become -inf.
        """
        top_p = self._columns.top_p
        assert top_p is not None
        own = self._weights.gather(1, torch.tensor(places, device=bounds.device)[:, None])
        upto = self._above(own * (1.0 - _ALIKE) - _LEAST)
        surely_inside = upto * (1.0 + _MARGIN) - own < top_p * self._total * (1.0 - _MARGIN)
        unsure = (top_p < 1.0) & ~surely_inside
        if not bool(unsure.any()):
            return False
        outside = self._above(own * (1.0 + _ALIKE) + _LEAST) >= surely_reached(self._total, top_p)
        if bool(outside.any()):
            bounds.masked_fill_(outside & (self._weights <= own), float("-inf"))
        rows = (unsure & ~outside)[:, 0].nonzero()[:, 0].tolist()
        changed = [self._rule_out_exactly(row, bounds[row], places[row], top_p[row]) for row in rows]
        return bool(outside.any()) or any(changed)

    def _above(self, least: Tensor) -> Tensor:
        """Return the sum of all weights above `least`: [rows, 1]."""
        # 1 or 0 for each, by signs: comparisons take several times as long.
        spare = torch.sub(self._weights, least, out=self._work.like("spare", self._weights))
        return sums(spare.sign_().clamp_(min=0.0).mul_(self._weights))

    def _rule_out_exactly(self, row: int, bounds: Tensor, place: int, top_p: Tensor) -> bool:
        def exact(logits: Tensor) -> Tensor:
            return exact_weights(logits, self._top[row : row + 1], self._columns.scale[row : row + 1], self._work)

        def ahead(weights: Tensor, words: Tensor) -> Tensor:
            return (weights > own) | ((weights == own) & (words < ids[place]))

        logits, ids = self._logits[row : row + 1], self._ids if self._ids.ndim == 1 else self._ids[row]
        own = exact(logits[:, place : place + 1]).clone()
        words, those = (logits, ids) if self._whole is None else self._whole(row)
        weights = exact(words)
        before = torch.where(ahead(weights, those), weights, 0.0).sum()
        if bool(before < top_p * weights.sum()):
            return False
        bounds.masked_fill_(~ahead(exact(logits), ids)[0], float("-inf"))
        return True
