"""Which word of a row has the highest logit over temperature plus noise, of those that filters keep.

Noise of all words is dear, and a row has one winner: the first bits of a word's uniform number say how high it can
score at most, and only the few that can be the highest are scored.

A winner must be in the nucleus: among the fewest of the likeliest words whose probabilities sum to at least top-p. It
is, if what is likelier, or as likely and comes first, makes up less than top-p. That is asked of the words that win,
and nothing is sorted: a winner outside is ruled out, and the next is found. Quick sums in fp32 tell it but for words at
the very edge; for those it is computed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from choreo_agents.sampling.draw import DrawColumns
from choreo_agents.sampling.elementary import exp2_, rounded_for_sums_
from choreo_agents.sampling.likeliest import CHUNK, highest, in_chunks, peaks, words_of
from choreo_agents.sampling.noise import FIRST_BITS, first_bits, gumbel
from choreo_agents.sampling.workspace import Workspace

_LEAST_BITS = 2.0**-33
"""In units of the first bits: less than any uniform number is."""
_EXPONENT_BIAS = 127
_EXPONENT_MARGIN = 0.01
"""In exponents of 2: far more than fp32 loses where it says where to look."""
_MARGIN = 1e-3
"""Relative. In two levels, sums of 2**18 numbers lose less than a tenth of it in any order."""
_ALIKE = 1e-5
"""Relative: what is nearer to each other may be as likely, or in another order."""
_LEAST = 2.0**-30
"""The same, absolutely: exact weights are multiples of less."""


def sums(weights: Tensor) -> Tensor:
    """[rows, words] to [rows, 1], in two levels, so that rounding errors stay small."""
    return weights.view(len(weights), -1, CHUNK).sum(dim=-1).sum(dim=-1, keepdim=True)


def surely_reached(total: Tensor, top_p: Tensor) -> Tensor:
    """The weight with which a nucleus is surely complete, of about this total: [rows, 1]."""
    return torch.where(top_p < 1.0, top_p * total * (1.0 + _MARGIN), float("inf"))


def exact_weights(logits: Tensor, top: Tensor, scale: Tensor | float, work: Workspace) -> Tensor:
    """Each word's probability over the likeliest one's, as doubles of which any sum is exact; until the next call."""
    exponents = torch.sub(logits, top, out=work.like("spare", logits)).mul_(scale)
    weights = exp2_(exponents, work.like("floats", logits), work.like("spare_bits", logits))
    return rounded_for_sums_(work.like("exact", logits).copy_(weights), work.width)


class GumbelMax:
    """The words of some rows that may win: each [rows, words], a multiple of a chunk.

    Args:
        work: Lends memory, until the winners are known.
        asked: What the rows ask for.
        logits: -inf for those that may not.
        ids: int32: the same for all rows, [words], or each row's own.
        top: The highest logits: [rows, 1].
        whole: The logits of all words of a row, [1, n], and which words these are, int32, [n]; None: there are no more
            that may be in a nucleus.
        total: About what the weights of these sum to: fp32, [rows, 1].
    """

    def __init__(
        self,
        work: Workspace,
        asked: DrawColumns,
        logits: Tensor,
        ids: Tensor,
        top: Tensor,
        whole: Callable[[int], tuple[Tensor, Tensor]] | None = None,
        total: Tensor | None = None,
    ) -> None:
        self._work, self._asked, self._logits, self._ids, self._top = work, asked, logits, ids, top
        self._whole = whole
        self._exponents = torch.sub(logits, top, out=work.like("exponents", logits)).mul_(asked.scale)
        if asked.top_p is not None:
            self._weights = torch.exp2(self._exponents, out=work.like("weights", logits))
            """About each word's probability over the likeliest one's."""
            self._total = sums(self._weights) if total is None else total

    def winners(self) -> list[int]:
        """The word of each row that wins."""
        work, logits = self._work, self._logits
        keys = torch.tensor([draw.noise for draw in self._asked.draws], dtype=torch.int32).to(logits.device)
        bits = first_bits(self._ids, keys, work.like("bits", logits), work.like("spare_bits", logits))
        bounds = self._bounds(bits)
        if self._asked.least is not None:
            bounds.masked_fill_(self._exponents < self._asked.least, float("-inf"))
        while True:
            found = self._highest(bounds, bits)
            if self._asked.top_p is None or not self._rule_out(bounds, [place for _, place in found]):
                return [word for word, _ in found]

    def _bounds(self, bits: Tensor) -> Tensor:
        """What no word's score is above, as an exponent of 2.

        A score is ln(weight / E), with E = -ln(1 - u) of the word's uniform number u. E is at least u, u at least its
        first bits, and the logarithm of these at least what their bits are as a float, read as an integer.
        """
        bounds, floats = self._work.like("bounds", bits), self._work.like("floats", bits)
        floats.copy_(bits).clamp_(min=_LEAST_BITS)
        bounds.copy_(floats.view(torch.int32))
        return torch.sub(self._exponents, bounds, alpha=2.0**-23, out=bounds)

    def _highest(self, bounds: Tensor, bits: Tensor) -> list[tuple[int, int]]:
        """For each row the word that scores highest, and its place: only those that can be it are scored."""
        tops, exponents, draws = peaks(bounds), self._exponents, self._asked.draws
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
        told = (each.tolist() for each in (rows, ids, places, self._logits[rows, places]))
        for row, word, place, logit in zip(*told, strict=True):
            score = (logit - highs[row]) / draws[row].sampling.temperature + gumbel(word, draws[row].noise)
            best[row] = max(best[row], (score, -word, place))
        assert all(score > float("-inf") for score, _, _ in best), "a row must have a word that may win"
        return [(-word, place) for _, word, place in best]

    def _rule_out(self, bounds: Tensor, found: Sequence[int]) -> bool:
        """Whether the word found in a row, at these places, is outside the nucleus.

        Then it, and all that come behind it, are ruled out: their `bounds`, [rows, words], become -inf.
        """
        top_p = self._asked.top_p
        assert top_p is not None
        own = self._weights.gather(1, torch.tensor(found, device=bounds.device)[:, None])
        upto = self._above(own * (1.0 - _ALIKE) - _LEAST)
        surely_inside = upto * (1.0 + _MARGIN) - own < top_p * self._total * (1.0 - _MARGIN)
        unsure = (top_p < 1.0) & ~surely_inside
        if not bool(unsure.any()):
            return False
        outside = self._above(own * (1.0 + _ALIKE) + _LEAST) >= surely_reached(self._total, top_p)
        if bool(outside.any()):
            bounds.masked_fill_(outside & (self._weights <= own), float("-inf"))
        asked = (unsure & ~outside)[:, 0].nonzero()[:, 0].tolist()
        changed = [self._rule_out_exactly(row, bounds[row], found[row], top_p[row]) for row in asked]
        return bool(outside.any()) or any(changed)

    def _above(self, least: Tensor) -> Tensor:
        """The sum of all weights above this: [rows, 1]."""
        # 1 or 0 for each, with signs: comparisons take several times as long.
        spare = torch.sub(self._weights, least, out=self._work.like("spare", self._weights))
        return sums(spare.sign_().clamp_(min=0.0).mul_(self._weights))

    def _rule_out_exactly(self, row: int, bounds: Tensor, found: int, top_p: Tensor) -> bool:
        def exact(logits: Tensor) -> Tensor:
            return exact_weights(logits, self._top[row : row + 1], self._asked.scale[row : row + 1], self._work)

        def ahead(weights: Tensor, words: Tensor) -> Tensor:
            return (weights > own) | ((weights == own) & (words < ids[found]))

        logits, ids = self._logits[row : row + 1], self._ids if self._ids.ndim == 1 else self._ids[row]
        own = exact(logits[:, found : found + 1]).clone()
        words, those = (logits, ids) if self._whole is None else self._whole(row)
        weights = exact(words)
        before = torch.where(ahead(weights, those), weights, 0.0).sum()
        if bool(before < top_p * weights.sum()):
            return False
        bounds.masked_fill_(~ahead(exact(logits), ids)[0], float("-inf"))
        return True
