"""Rows whose filters may leave any number of words.

One pass over all words finds the highest of every sixteen. Words are above a threshold if these are: where the highest
alone make up a nucleus above it, so do all words that are, and the others need not be looked at again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Draw, DrawColumns
from choreo_agents.sampling.gumbel_max import GumbelMax, sums, surely_reached
from choreo_agents.sampling.likeliest import CHUNK
from choreo_agents.sampling.rows import StepRows
from choreo_agents.sampling.workspace import Workspace

_STRAND = 16
"""Words of which the highest is kept; they stand far apart, so that whole vectors are compared."""
_WORTH = 4
"""A row is looked at as a whole if more than one in so many strands is left."""
_NOWHERE, _LOWEST, _HALVINGS = -1e30, -40.0, 9
"""Thresholds, as exponents of 2: where every word is above, where the search for a higher one starts, and its steps."""
_MARGIN = 0.01
"""In exponents, for what only says where to look."""


class NucleusFilter:
    """Draws tokens for some rows of a step.

    Args:
        work: Lends memory.
        step: Their logits.
        draws: What all rows of the step ask for.
        rows: These rows.
    """

    def __init__(self, work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]) -> None:
        self._work, self._step, self._rows = work, step, rows
        self._asked = DrawColumns.by([draws[row] for row in rows], work.device)
        self._top = torch.empty(len(rows), 1, dtype=torch.float32, device=work.device)
        self._total = torch.empty(len(rows), 1, dtype=torch.float32, device=work.device)
        self._tokens = [-1] * len(rows)

    def tokens(self) -> list[int]:
        """One for each row."""
        filtered = [
            place
            for place, draw in enumerate(self._asked.draws)
            if draw.sampling.top_p < 1.0 or draw.sampling.min_p > 0.0
        ]
        whole = set(range(len(self._rows))) - set(filtered)
        if filtered:
            peaks, threshold, counts = self._thresholds(filtered)
            few = [nth for nth, count in enumerate(counts) if count * _STRAND * _WORTH <= self._work.width]
            whole |= {filtered[nth] for nth in set(range(len(filtered))) - set(few)}
            if few:
                most = max(counts[nth] for nth in few)
                self._draw_few(filtered, few, peaks, threshold, most)
        if whole:
            self._draw_whole(sorted(whole))
        return self._tokens

    def _thresholds(self, places: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """For some rows the highest of each strand, as exponents, [rows, strands]; an exponent that all words are above
        which may win, [rows, 1]; and how many strands are.
        """
        work, asked = self._work, self._asked.of(places)
        peaks = work.room("strands", len(places), work.width // _STRAND)
        total = torch.ones(len(places), 1, dtype=torch.float32, device=work.device)
        for block in self._step.blocks([self._rows[place] for place in places], work.width, cut=True):
            words, top, mine = block.whole(), block.tops.amax(dim=-1, keepdim=True), list(block.places)
            own = torch.sub(words, top, out=work.like("weights", words)).mul_(asked.of(mine).scale)
            peaks[mine] = own.view(len(mine), _STRAND, -1).amax(dim=1)
            if asked.top_p is not None:
                total[mine] = sums(torch.exp2(own, out=own))
            self._top[[places[each] for each in mine]] = top
        threshold = torch.full_like(total, _NOWHERE)
        if asked.top_p is not None:
            self._total[list(places)] = total
            weights = torch.exp2(peaks, out=work.like("floats", peaks))
            enough, low, high = surely_reached(total, asked.top_p), threshold, torch.zeros_like(total)
            middle = torch.full_like(total, _LOWEST)
            for _ in range(_HALVINGS):
                is_enough = self._above(peaks, middle).mul_(weights).sum(dim=-1, keepdim=True) >= enough
                low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
                middle = torch.where(low > _NOWHERE, (low + high) * 0.5, low)
            threshold = low
        if asked.least is not None:
            threshold = torch.maximum(threshold, asked.least - _MARGIN)
        return peaks, threshold, self._above(peaks, threshold).sum(dim=-1).int().tolist()

    def _above(self, exponents: Tensor, threshold: Tensor) -> Tensor:
        """1 for those above it, and 0 for others: with signs, for comparisons take several times as long."""
        spare = torch.sub(exponents, threshold, out=self._work.like("spare", exponents))
        return spare.sign_().clamp_(min=0.0)

    def _draw_few(
        self, filtered: Sequence[int], few: Sequence[int], peaks: Tensor, threshold: Tensor, most: int
    ) -> None:
        """Those few of the filtered rows of which at most so many strands are looked at."""
        work, strands = self._work, peaks.shape[1]
        among = torch.arange(0, work.width, strands, device=work.device)
        found: list[tuple[Sequence[int], Sequence[int], Tensor, Tensor]] = []
        rows_of_step = [self._rows[filtered[nth]] for nth in few]
        for block in self._step.blocks(rows_of_step, most * _STRAND, cut=True):
            mine = [few[place] for place in block.places]
            places = [filtered[nth] for nth in mine]
            least = threshold[mine]
            rows, strand = (peaks[mine] > least).nonzero(as_tuple=True)
            first = block.which.index_select(0, rows).mul_(work.width).add_(strand)
            where = torch.add(first[:, None], among, out=work.room("places", len(rows), _STRAND))
            logits = work.room("found", len(rows), _STRAND)
            torch.index_select(block.words.view(-1), 0, where.view(-1), out=logits.view(-1))
            top, scale = self._top[places].index_select(0, rows), self._asked.of(places).scale.index_select(0, rows)
            exponents = torch.sub(logits, top, out=work.like("exponents", logits)).mul_(scale)
            above = (exponents > least.index_select(0, rows)).view(-1).nonzero()[:, 0]
            which = above.div(_STRAND, rounding_mode="floor")
            words = strand.index_select(0, which).add_((above % _STRAND).mul_(strands))
            rows = rows.index_select(0, which)
            sizes = torch.bincount(rows, minlength=len(places)).tolist()
            found.append((places, sizes, words.to(torch.int32), logits.view(-1).index_select(0, above)))
            if sum(len(places) for places, *_ in found) * max(sizes) > work.rows * work.width:
                self._decide(found)
                found = []
        if found:
            self._decide(found)

    def _decide(self, found: Sequence[tuple[Sequence[int], Sequence[int], Tensor, Tensor]]) -> None:
        """The tokens of rows: places, how many words of each may win, which they are, one after the other, int32, and
        their logits.
        """
        places, counts, words, values = zip(*found, strict=True)
        mine = [*chain.from_iterable(places)]
        sizes = torch.tensor([*chain.from_iterable(counts)], device=self._work.device)
        rows = torch.arange(len(mine), device=sizes.device).repeat_interleave(sizes)
        columns = torch.arange(len(rows), device=sizes.device) - (sizes.cumsum(0) - sizes).index_select(0, rows)
        width = -(-max(map(max, counts)) // CHUNK) * CHUNK
        logits = torch.full((len(mine), width), float("-inf"), dtype=torch.float32, device=sizes.device)
        ids = torch.zeros((len(mine), width), dtype=torch.int32, device=sizes.device)
        logits[rows, columns] = torch.cat(values)
        ids[rows, columns] = torch.cat(words)
        asked, top, total = self._asked.of(mine), self._top[mine], self._total[mine]
        contest = GumbelMax(self._work, asked, logits, ids, top, lambda row: self._row(mine[row]), total)
        self._put(mine, contest.winners())

    def _row(self, place: int) -> tuple[Tensor, Tensor]:
        """All words of a row."""
        [block] = self._step.blocks([self._rows[place]], self._work.width, cut=True)
        return block.whole(), self._work.ids

    def _draw_whole(self, places: Sequence[int]) -> None:
        """Rows of which all words are looked at."""
        work = self._work
        for block in self._step.blocks([self._rows[place] for place in places], work.width, cut=True):
            mine, words = [places[each] for each in block.places], block.whole()
            top = block.tops.amax(dim=-1, keepdim=True)
            self._put(mine, GumbelMax(work, self._asked.of(mine), words, work.ids, top).winners())

    def _put(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        for place, token in zip(places, tokens, strict=True):
            self._tokens[place] = token
