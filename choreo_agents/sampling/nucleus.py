"""Whether a word is in the nucleus: among the fewest of the likeliest words whose probabilities sum to at least top-p.

It is, if what is likelier, or as likely and comes first, makes up less than top-p. That is asked of the words that win,
and nothing is sorted. Quick sums in fp32 tell it but for words at the very edge; for those it is computed exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.elementary import exp2_, rounded_for_sums_
from choreo_agents.sampling.likeliest import CHUNK
from choreo_agents.sampling.workspace import Workspace

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


@dataclass(frozen=True)
class Nucleus:
    """The nuclei of some rows."""

    weights: Tensor
    """About each word's probability over the likeliest one's: fp32, [rows, words], of all words that may be in it."""
    total: Tensor
    """About what those of all words sum to: fp32, [rows, 1]."""
    top_p: Tensor
    """Doubles, [rows, 1]."""
    whole: Callable[[int], tuple[Tensor, Tensor]]
    """The logits of all words of a row, [1, n], and which words these are: int32, [n]."""

    def rule_out(
        self, bounds: Tensor, logits: Tensor, ids: Tensor, found: Tensor, top: Tensor, scale: Tensor, work: Workspace
    ) -> bool:
        """Whether the word found in a row is outside; then it, and all that come behind it, are ruled out in `bounds`.

        Args:
            bounds: Become -inf: [rows, words], as are the logits.
            logits: Of the words of `weights`.
            ids: Which words these are: int32, the same for all rows or each row's own.
            found: Where each row's word is: [rows, 1].
            top: The highest logits, [rows, 1], and `scale` likewise: from logits to exponents of 2.
            work: Lends memory.
        """
        own = self.weights.gather(1, found)
        upto = self._above(own * (1.0 - _ALIKE) - _LEAST, work)
        surely_inside = upto * (1.0 + _MARGIN) - own < self.top_p * self.total * (1.0 - _MARGIN)
        unsure = (self.top_p < 1.0) & ~surely_inside
        if not bool(unsure.any()):
            return False
        outside = self._above(own * (1.0 + _ALIKE) + _LEAST, work) >= surely_reached(self.total, self.top_p)
        if bool(outside.any()):
            bounds.masked_fill_(outside & (self.weights <= own), float("-inf"))
        asked = (unsure & ~outside)[:, 0].nonzero()[:, 0].tolist()
        changed = [
            self._rule_out_exactly(row, bounds[row], logits[row], ids if ids.ndim == 1 else ids[row], *rest, work)
            for row in asked
            for rest in [(int(found[row]), top[row : row + 1], scale[row : row + 1])]
        ]
        return bool(outside.any()) or any(changed)

    def _above(self, least: Tensor, work: Workspace) -> Tensor:
        """The sum of all weights above this: [rows, 1]."""
        # 1 or 0 for each, with signs: comparisons take several times as long.
        spare = torch.sub(self.weights, least, out=work.like("spare", self.weights))
        return sums(spare.sign_().clamp_(min=0.0).mul_(self.weights))

    def _rule_out_exactly(
        self,
        row: int,
        bounds: Tensor,
        logits: Tensor,
        ids: Tensor,
        found: int,
        top: Tensor,
        scale: Tensor,
        work: Workspace,
    ) -> bool:
        def ahead(weights: Tensor, words: Tensor) -> Tensor:
            return (weights > own) | ((weights == own) & (words < ids[found]))

        own = exact_weights(logits[found].view(1, 1), top, scale, work).clone()
        words, those = self.whole(row)
        weights = exact_weights(words, top, scale, work)
        before = torch.where(ahead(weights, those), weights, 0.0).sum()
        if bool(before < self.top_p[row] * weights.sum()):
            return False
        bounds.masked_fill_(~ahead(exact_weights(logits[None], top, scale, work), ids)[0], float("-inf"))
        return True
