"""Sampling of rows whose top-p and min-p may keep any number of tokens.

One pass over the vocabulary finds the highest logit of every strand of sixteen. If the peaks above a threshold make up
a nucleus alone, then so do all tokens above it: strands with lower peaks need not be read again.
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
"""Tokens of a strand, of which the highest is kept; they lie far apart, so that whole vectors are compared."""
_WORTH = 4
"""A row is processed whole if more than one in this many strands is above the threshold."""
_NOWHERE, _LOWEST, _HALVINGS = -1e30, -40.0, 9
"""Thresholds as exponents of 2: one below every token, the start of the search for a higher one, and its steps."""
_MARGIN = 0.01
"""Margin, in exponents, of a threshold that only says where to look."""


class NucleusFilter:
    """Draw of tokens for some rows of a step.

    Args:
        work: Lends memory.
        step: Logits of the step.
        draws: Sampling settings by row of the step.
        rows: Rows to draw for.
    """

    def __init__(self, work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]) -> None:
        self._work, self._step, self._rows = work, step, rows
        self._columns = DrawColumns.by([draws[row] for row in rows], work.device)
        self._top = torch.empty(len(rows), 1, dtype=torch.float32, device=work.device)
        self._total = torch.empty(len(rows), 1, dtype=torch.float32, device=work.device)
        self._tokens = [-1] * len(rows)

    def tokens(self) -> list[int]:
        """Draw a token for each row."""
        filtered = [
            place
            for place, draw in enumerate(self._columns.draws)
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
        """Return peaks, thresholds and counts of some rows.

        Peaks are the highest exponent of each strand, [rows, strands]; thresholds, [rows, 1], are below all tokens that
        may win; counts are the strands of each row that are above.
        """
        work, columns = self._work, self._columns.of(places)
        peaks = work.buffer("strands", len(places), work.width // _STRAND)
        total = torch.ones(len(places), 1, dtype=torch.float32, device=work.device)
        for block in self._step.blocks([self._rows[place] for place in places], work.width, cut=True):
            whole, top, indices = block.whole(), block.tops.amax(dim=-1, keepdim=True), list(block.places)
            own = torch.sub(whole, top, out=work.like("weights", whole)).mul_(columns.of(indices).scale)
            peaks[indices] = own.view(len(indices), _STRAND, -1).amax(dim=1)
            if columns.top_p is not None:
                total[indices] = sums(torch.exp2(own, out=own))
            self._top[[places[index] for index in indices]] = top
        threshold = torch.full_like(total, _NOWHERE)
        if columns.top_p is not None:
            self._total[list(places)] = total
            weights = torch.exp2(peaks, out=work.like("floats", peaks))
            enough, low, high = surely_reached(total, columns.top_p), threshold, torch.zeros_like(total)
            middle = torch.full_like(total, _LOWEST)
            for _ in range(_HALVINGS):
                is_enough = self._above(peaks, middle).mul_(weights).sum(dim=-1, keepdim=True) >= enough
                low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
                middle = torch.where(low > _NOWHERE, (low + high) * 0.5, low)
            threshold = low
        if columns.least is not None:
            threshold = torch.maximum(threshold, columns.least - _MARGIN)
        return peaks, threshold, self._above(peaks, threshold).sum(dim=-1).int().tolist()

    def _above(self, exponents: Tensor, threshold: Tensor) -> Tensor:
        """Return 1 for exponents above the threshold, else 0; by signs, as comparisons take several times as long."""
        spare = torch.sub(exponents, threshold, out=self._work.like("spare", exponents))
        return spare.sign_().clamp_(min=0.0)

    def _draw_few(self, filtered: Sequence[int], few: Sequence[int], peaks: Tensor, bound: Tensor, most: int) -> None:
        """Draw for those of the filtered rows (indices `few`) of which at most `most` strands are read."""
        work, strands = self._work, peaks.shape[1]
        among = torch.arange(0, work.width, strands, device=work.device)
        batches: list[tuple[Sequence[int], Sequence[int], Tensor, Tensor]] = []
        rows_of_step = [self._rows[filtered[nth]] for nth in few]
        for block in self._step.blocks(rows_of_step, most * _STRAND, cut=True):
            indices = [few[place] for place in block.places]
            places = [filtered[nth] for nth in indices]
            least = bound[indices]
            rows, strand = (peaks[indices] > least).nonzero(as_tuple=True)
            first = block.which.index_select(0, rows).mul_(work.width).add_(strand)
            where = torch.add(first[:, None], among, out=work.buffer("places", len(rows), _STRAND))
            logits = work.buffer("found", len(rows), _STRAND)
            torch.index_select(block.logits.view(-1), 0, where.view(-1), out=logits.view(-1))
            top, scale = self._top[places].index_select(0, rows), self._columns.of(places).scale.index_select(0, rows)
            exponents = torch.sub(logits, top, out=work.like("exponents", logits)).mul_(scale)
            above = (exponents > least.index_select(0, rows)).view(-1).nonzero()[:, 0]
            which = above.div(_STRAND, rounding_mode="floor")
            ids = strand.index_select(0, which).add_((above % _STRAND).mul_(strands))
            rows = rows.index_select(0, which)
            sizes = torch.bincount(rows, minlength=len(places)).tolist()
            batches.append((places, sizes, ids.to(torch.int32), logits.view(-1).index_select(0, above)))
            if sum(len(places) for places, *_ in batches) * max(sizes) > work.rows * work.width:
                self._decide(batches)
                batches = []
        if batches:
            self._decide(batches)

    def _decide(self, batches: Sequence[tuple[Sequence[int], Sequence[int], Tensor, Tensor]]) -> None:
        """Draw tokens for batches of rows.

        Each batch has the rows' places, the number of tokens of each that may win, and these tokens' ids, int32, and
        logits, concatenated.
        """
        places, counts, id_lists, values = zip(*batches, strict=True)
        all_places = [*chain.from_iterable(places)]
        sizes = torch.tensor([*chain.from_iterable(counts)], device=self._work.device)
        rows = torch.arange(len(all_places), device=sizes.device).repeat_interleave(sizes)
        columns = torch.arange(len(rows), device=sizes.device) - (sizes.cumsum(0) - sizes).index_select(0, rows)
        width = -(-max(map(max, counts)) // CHUNK) * CHUNK
        logits = torch.full((len(all_places), width), float("-inf"), dtype=torch.float32, device=sizes.device)
        ids = torch.zeros((len(all_places), width), dtype=torch.int32, device=sizes.device)
        logits[rows, columns] = torch.cat(values)
        ids[rows, columns] = torch.cat(id_lists)
        draws, top, total = self._columns.of(all_places), self._top[all_places], self._total[all_places]
        gumbel_max = GumbelMax(self._work, draws, logits, ids, top, lambda row: self._row(all_places[row]), total)
        self._record(all_places, gumbel_max.winners())

    def _row(self, place: int) -> tuple[Tensor, Tensor]:
        """Return all logits of a row, and their token ids."""
        [block] = self._step.blocks([self._rows[place]], self._work.width, cut=True)
        return block.whole(), self._work.ids

    def _draw_whole(self, places: Sequence[int]) -> None:
        """Draw for rows of which all tokens are read."""
        work = self._work
        for block in self._step.blocks([self._rows[place] for place in places], work.width, cut=True):
            block_places, whole = [places[index] for index in block.places], block.whole()
            top = block.tops.amax(dim=-1, keepdim=True)
            self._record(block_places, GumbelMax(work, self._columns.of(block_places), whole, work.ids, top).winners())

    def _record(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        for place, token in zip(places, tokens, strict=True):
            self._tokens[place] = token
