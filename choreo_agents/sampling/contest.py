"""Which word of a row has the highest logit over temperature plus noise, of those that filters keep.

Noise of all words is dear, and a row has one winner: the first bits of a word's uniform number say how high it can
score at most, and only the few that can be the highest are scored. A winner outside the nucleus is ruled out, and the
next is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Asked
from choreo_agents.sampling.likeliest import highest, in_chunks, peaks, words_of
from choreo_agents.sampling.noise import FIRST_BITS, NoiseKey, first_bits, gumbel
from choreo_agents.sampling.nucleus import Nucleus
from choreo_agents.sampling.workspace import Workspace

_LEAST = 2.0**-33
"""In units of the first bits: less than any uniform number is."""
_EXPONENT_BIAS = 127
_MARGIN = 0.01
"""In exponents of 2: far more than fp32 loses where it says where to look."""


@dataclass(frozen=True)
class Contest:
    """The words of some rows that may win: each [rows, words], a multiple of a chunk."""

    logits: Tensor
    """-inf for those that may not."""
    ids: Tensor
    """int32: the same for all rows, [words], or each row's own."""
    top: Tensor
    """The highest logits: [rows, 1], as are the others."""
    temperatures: Sequence[float]
    noise: Sequence[NoiseKey]
    scale: Tensor
    """From logits to exponents of 2."""
    least: Tensor | None
    """Words whose exponent is below this do not win."""
    nucleus: Nucleus | None

    def winners(self, work: Workspace) -> list[int]:
        """The word of each row that wins."""
        keys = torch.tensor(self.noise, dtype=torch.int32).to(self.logits.device)
        bits = first_bits(self.ids, keys, work.like("bits", self.logits), work.like("spare_bits", self.logits))
        exponents = torch.sub(self.logits, self.top, out=work.like("exponents", self.logits)).mul_(self.scale)
        bounds = self._bounds(exponents, bits, work)
        if self.least is not None:
            bounds.masked_fill_(exponents < self.least, float("-inf"))
        while True:
            found = self._highest(exponents, bounds, bits)
            if self.nucleus is not None:
                places = torch.tensor([[place] for _, place in found], device=bits.device)
                if self.nucleus.rule_out(bounds, self.logits, self.ids, places, self.top, self.scale, work):
                    continue
            return [word for word, _ in found]

    def _bounds(self, exponents: Tensor, bits: Tensor, work: Workspace) -> Tensor:
        """What no word's score is above, as an exponent of 2.

        A score is ln(weight / E), with E = -ln(1 - u) of the word's uniform number u. E is at least u, u at least its
        first bits, and the logarithm of these at least what their bits are as a float, read as an integer.
        """
        bounds, floats = work.like("bounds", bits), work.like("floats", bits)
        floats.copy_(bits).clamp_(min=_LEAST)
        bounds.copy_(floats.view(torch.int32))
        return torch.sub(exponents, bounds, alpha=2.0**-23, out=bounds)

    def _highest(self, exponents: Tensor, bounds: Tensor, bits: Tensor) -> list[tuple[int, int]]:
        """For each row the word that scores highest, and its place: only those that can be it are scored."""
        tops = peaks(bounds)
        first = highest(bounds, tops)
        uniform = (bits.gather(1, first).to(torch.float64) + 1.0) * 2.0**-FIRST_BITS
        energy = -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-53))
        surely = exponents.gather(1, first) - torch.log2(energy) - (FIRST_BITS + _EXPONENT_BIAS + _MARGIN)
        chunks = tops.topk(int((tops >= surely).sum(dim=-1).amax()), sorted=False).indices
        near = in_chunks(bounds, chunks)
        rows, places = ((near >= surely) & (near > float("-inf"))).nonzero(as_tuple=True)
        places = words_of(chunks)[rows, places]
        ids = self.ids[places] if self.ids.ndim == 1 else self.ids[rows, places]
        best = [(float("-inf"), 1, 0)] * len(bounds)
        highs = self.top[:, 0].tolist()
        told = (each.tolist() for each in (rows, ids, places, self.logits[rows, places]))
        for row, word, place, logit in zip(*told, strict=True):
            score = (logit - highs[row]) / self.temperatures[row] + gumbel(word, self.noise[row])
            best[row] = max(best[row], (score, -word, place))
        assert all(score > float("-inf") for score, _, _ in best), "a row must have a word that may win"
        return [(-word, place) for _, word, place in best]


def contest_of(
    asked: Asked,
    logits: Tensor,
    ids: Tensor,
    top: Tensor,
    whole: Callable[[int], tuple[Tensor, Tensor]],
    weights: Tensor | None,
    total: Tensor | None,
) -> Contest:
    """The contest of the words that rows are left with; see `Contest`, and `Nucleus` for the last three.

    Weights and totals must be there if a row has a top-p.
    """
    nucleus = None
    if asked.top_p is not None:
        assert weights is not None and total is not None
        nucleus = Nucleus(weights, total, asked.top_p, whole)
    temperatures, noise = [draw.sampling.temperature for draw in asked.draws], [draw.noise for draw in asked.draws]
    return Contest(logits, ids, top, temperatures, noise, asked.scale, asked.least, nucleus)
