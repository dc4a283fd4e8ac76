"""The logits of a step's rows as they are drawn from: where they stand, or, if anything changes them, in a copy.

A row without any number is a failure of the pass that has computed it, and nothing is drawn from it. What is not a
number beside numbers is the lowest or the highest there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Draw, are_in_a_row
from choreo_agents.sampling.likeliest import CHUNK, peaks
from choreo_agents.sampling.workspace import Workspace

HIGHEST = torch.finfo(torch.float32).max
LOW = -1e38
"""A row whose highest logit is below has, perhaps, no numbers but -inf."""


@dataclass(frozen=True)
class Block:
    """Some rows that are looked at together, until the next block is."""

    places: Sequence[int]
    """Where they stand among the rows that were asked for."""
    words: Tensor
    """fp32, contiguous, [some rows, words]: a multiple of a chunk."""
    which: Tensor
    """The rows of it that are meant: int64, [rows]."""
    tops: Tensor
    """Their peaks: [rows, chunks]."""
    is_all: bool = True
    """Whether they are all of it, in order."""

    def whole(self) -> Tensor:
        """All words of the rows: [rows, words]. Not to be written to."""
        return self.words if self.is_all else self.words.index_select(0, self.which)


class StepRows:
    """Rows of a step.

    Args:
        work: Lends memory for copies.
        logits: [rows, vocabulary].
        rows: Which of them.
        draws: What these ask for; None: nothing that changes them.
    """

    def __init__(
        self, work: Workspace, logits: Tensor, rows: Sequence[int], draws: Mapping[int, Draw] | None = None
    ) -> None:
        self._work, self._logits, self._draws = work, logits, draws or {}
        self._is_direct = [False] * len(logits)
        if logits.dtype == torch.float32 and work.vocabulary == work.width and logits.is_contiguous():
            plain = [row for row in sorted(rows) if row not in self._draws or not self._draws[row].changes]
            self._tops = torch.empty(len(logits), work.width // CHUNK, device=logits.device)
            for run in _runs(plain):
                self._tops[run] = peaks(logits[run])
            # What is not a number shows in its chunk's peak, and -inf changes nothing below numbers.
            highest = self._tops.amax(dim=-1).tolist()
            for row in plain:
                self._is_direct[row] = LOW < highest[row] <= HIGHEST

    def blocks(self, rows: Sequence[int], words: int, *, cut: bool = False) -> Iterator[Block]:
        """Some rows, each in one block.

        Args:
            rows: Of the step.
            words: As many of each row are looked at.
            cut: Whether a top-k leaves nothing but what it keeps.
        """
        direct: list[int] = []
        written: list[int] = []
        for place, row in enumerate(rows):
            is_cut = cut and 0 < self._draws[row].sampling.top_k < self._work.vocabulary
            (direct if self._is_direct[row] and not is_cut else written).append(place)
        for places in _parts(direct, self._work.rows_of(words)):
            mine = [rows[place] for place in places]
            if are_in_a_row(mine):
                which, run = torch.arange(len(mine), device=self._logits.device), slice(mine[0], mine[-1] + 1)
                yield Block(places, self._logits[run], which, self._tops[run])
            else:
                which = torch.tensor(mine, device=self._logits.device)
                yield Block(places, self._logits, which, self._tops.index_select(0, which), is_all=False)
        for places in _parts(written, self._work.rows_of(self._work.width)):
            copy = self._written([rows[place] for place in places], cut=cut)
            yield Block(places, copy, torch.arange(len(places), device=copy.device), peaks(copy))

    def _written(self, rows: Sequence[int], *, cut: bool) -> Tensor:
        """Some rows penalised, masked, and numbers all of them; until the next are."""
        work = self._work
        words = work.room("logits", len(rows), work.width)
        own = words[:, : work.vocabulary]
        own.copy_(self._logits[rows[0] : rows[-1] + 1] if are_in_a_row(rows) else self._logits[list(rows)])
        if not own.isfinite().any(dim=-1).all():
            raise ArithmeticError("logits hold no number: the pass that has computed them went wrong")
        own.nan_to_num_(nan=-HIGHEST, posinf=HIGHEST, neginf=-HIGHEST)
        words[:, work.vocabulary :] = float("-inf")
        for one, draw in zip(own, map(self._draws.get, rows), strict=True):
            if draw is None:
                continue
            if draw.penalties is not None:
                draw.penalties.apply_(one)
            if draw.mask is not None:
                one.masked_fill_(~draw.mask, float("-inf"))
            top_k = draw.sampling.top_k
            if cut and 0 < top_k < work.vocabulary:
                one.masked_fill_(one < one.topk(top_k).values[-1], float("-inf"))
        return words


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Ascending rows as slices of those that follow each other."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield slice(rows[first], rows[place - 1] + 1)
            first = place


def _parts(places: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(places), most):
        yield places[first : first + most]
