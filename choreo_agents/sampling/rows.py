"""Logits of a step's rows as tokens are drawn from them: in place, or in a copy if anything changes them.

A row without any finite logit is a failure of the forward pass, and nothing is drawn from it. In other rows, NaN counts
as the lowest number, and infinities as the lowest or highest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.likeliest import CHUNK, peaks

HIGHEST = torch.finfo(torch.float32).max
LOW = -1e38
"""A row whose highest logit is below this may have no finite one."""
_TYPES = {"bits": torch.int32, "spare_bits": torch.int32, "exact": torch.float64}
"""Types of buffers that are not fp32."""
_BLOCK_WORDS = {"cpu": 1 << 18}
"""Logits in a block, by type of device: on a CPU, a block fits into the cache."""
_USUAL_BLOCK_WORDS = 1 << 22


class Workspace:
    """Buffers for blocks of rows of one vocabulary, on one device.

    They are reused for every block: a new page costs more than writing to it.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.width = -(-vocabulary // CHUNK) * CHUNK
        """Length of a row: the vocabulary, padded to whole chunks."""
        self.rows = self.rows_of(self.width)
        """Rows of a block of whole rows."""
        self.ids = torch.arange(self.width, dtype=torch.int32, device=device)
        self._buffers: dict[str, Tensor] = {}

    def rows_of(self, words: int) -> int:
        """Return the rows of a block if `words` logits of each are read."""
        return max(1, _BLOCK_WORDS.get(self.device.type, _USUAL_BLOCK_WORDS) // words)

    def like(self, name: str, shaped: Tensor) -> Tensor:
        """Return a buffer of the shape of `shaped`, [rows, words]; its contents are lost."""
        return self.buffer(name, *shaped.shape)

    def buffer(self, name: str, rows: int, words: int) -> Tensor:
        """Return a buffer as [rows, words]; its contents are lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * words:
            self._buffers[name] = buffer = torch.empty(
                rows * words, dtype=_TYPES.get(name, torch.float32), device=self.device
            )
        return buffer[: rows * words].view(rows, words)


@dataclass(frozen=True)
class Block:
    """Some rows that are processed together; valid until the next block."""

    places: Sequence[int]
    """Indices among the rows given to `blocks`."""
    logits: Tensor
    """Logits: fp32, contiguous, [some rows, words]; `words` is a multiple of a chunk."""
    which: Tensor
    """Indices in `logits` of the block's rows: int64, [rows]."""
    tops: Tensor
    """Peaks of these rows: [rows, chunks]."""
    is_all: bool = True
    """Whether `which` is all rows of `logits`, in order."""

    def whole(self) -> Tensor:
        """Return all logits of the block's rows: [rows, words]. Do not write to it."""
        return self.logits if self.is_all else self.logits.index_select(0, self.which)


class StepRows:
    """Logits of rows of a step.

    Args:
        work: Lends memory for copies.
        logits: [rows, vocabulary].
        rows: Rows that are used.
        draws: Their sampling settings; None: nothing changes the logits.
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
            # NaN shows in its chunk's peak, and -inf below finite logits needs no change.
            highest = self._tops.amax(dim=-1).tolist()
            for row in plain:
                self._is_direct[row] = LOW < highest[row] <= HIGHEST

    def blocks(self, rows: Sequence[int], words: int, *, cut: bool = False) -> Iterator[Block]:
        """Yield rows in blocks, each row once.

        Args:
            rows: Rows of the step.
            words: Logits of each row that the caller reads, which bounds the rows of a block.
            cut: Whether logits outside the top-k become -inf.
        """
        direct: list[int] = []
        written: list[int] = []
        for place, row in enumerate(rows):
            is_cut = cut and 0 < self._draws[row].sampling.top_k < self._work.vocabulary
            (direct if self._is_direct[row] and not is_cut else written).append(place)
        for places in _parts(direct, self._work.rows_of(words)):
            picked = [rows[place] for place in places]
            if _are_in_a_row(picked):
                which, run = torch.arange(len(picked), device=self._logits.device), slice(picked[0], picked[-1] + 1)
                yield Block(places, self._logits[run], which, self._tops[run])
            else:
                which = torch.tensor(picked, device=self._logits.device)
                yield Block(places, self._logits, which, self._tops.index_select(0, which), is_all=False)
        for places in _parts(written, self._work.rows_of(self._work.width)):
            copy = self._prepare_copy([rows[place] for place in places], cut=cut)
            yield Block(places, copy, torch.arange(len(places), device=copy.device), peaks(copy))

    def _prepare_copy(self, rows: Sequence[int], *, cut: bool) -> Tensor:
        """Copy rows, with penalties and masks applied and NaN replaced; valid until the next call."""
        work = self._work
        padded = work.buffer("logits", len(rows), work.width)
        own = padded[:, : work.vocabulary]
        own.copy_(self._logits[rows[0] : rows[-1] + 1] if _are_in_a_row(rows) else self._logits[list(rows)])
        if not own.isfinite().any(dim=-1).all():
            raise ArithmeticError("logits are NaN or infinite: the forward pass that computed them failed")
        own.nan_to_num_(nan=-HIGHEST, posinf=HIGHEST, neginf=-HIGHEST)
        padded[:, work.vocabulary :] = float("-inf")
        for logits, draw in zip(own, map(self._draws.get, rows), strict=True):
            if draw is None:
                continue
            if draw.penalties is not None:
                draw.penalties.apply_(logits)
            if draw.mask is not None:
                logits.masked_fill_(~draw.mask, float("-inf"))
            top_k = draw.sampling.top_k
            if cut and 0 < top_k < work.vocabulary:
                logits.masked_fill_(logits < logits.topk(top_k).values[-1], float("-inf"))
        return padded


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


def _are_in_a_row(rows: Sequence[int]) -> bool:
    """Return whether rows are consecutive, so that a slice selects them."""
    return all(row == rows[0] + place for place, row in enumerate(rows))
