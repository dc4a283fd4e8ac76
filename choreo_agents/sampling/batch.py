"""The next tokens of all rows of a step, drawn together.

    logits ── penalties, masks ── peaks ┬─ temperature 0 ─────────────────────────────── the highest
                                        ├─ a small top-k ── the words that it keeps ────┬─── contest
                                        └─ else ── the words that filters may leave ────┘

A row's choice is defined without reference to others: of the words that the filters keep, the one whose logit over
temperature plus Gumbel noise is highest. Everything that decides it is the same in any batch: maxima, comparisons,
integers, `elementary` functions, logarithms of single numbers, which stand in no vector, and sums of weights that
are rounded so that no order changes them. What only says where to look may be in any precision, for it leaves a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from choreo_agents.sampling.contest import Contest, exact_weights
from choreo_agents.sampling.draw import Asked, Draw
from choreo_agents.sampling.elementary import LOG2_E
from choreo_agents.sampling.likeliest import CHUNK, highest, highest_few
from choreo_agents.sampling.lottery import Lottery, Tickets
from choreo_agents.sampling.rows import HIGHEST, StepRows
from choreo_agents.sampling.sieve import Sieve
from choreo_agents.sampling.workspace import Workspace

_FEW = 128
"""A top-k up to here is cut out of the row; beyond, and with more ties than there is room for, the row is masked."""
_ROOM_FOR_TIES = 32
_STEP = 32
"""Of how many words are cut out."""


class BatchSampler:
    """Draws tokens on the device of the logits, in blocks of rows. For one thread at a time.

    Args:
        lottery: Draws those of most rows in one launch; None: all are drawn by torch's operators.
    """

    def __init__(self, lottery: Lottery | None = None) -> None:
        self._kept: Workspace | None = None
        self._lottery = lottery

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[Tickets], None] | None = None,
    ) -> list[int]:
        """A token for each of these rows of [rows, vocabulary] logits. What is not a number is the lowest, as is -inf.

        Raises `ArithmeticError` if a row has no number at all: the pass that has computed it went wrong.

        Args:
            logits: Are not written to, and rows that nothing changes are not copied.
            draws: What the rows ask for.
            rows: Which they are, in any order; None: all, in theirs.
            meanwhile: Called before the device is waited for, if it knows by then what all rows will all but surely
                say: with that.
        """
        rows = range(len(logits)) if rows is None else rows
        if self._lottery is None:
            return self._draw(logits, draws, rows)
        mine = [place for place, draw in enumerate(draws) if not draw.changes]
        tickets = self._lottery.draw(logits, [rows[place] for place in mine], [draws[place] for place in mine])
        if tickets is None:
            return self._draw(logits, draws, rows)
        if meanwhile is not None and len(mine) == len(draws):
            meanwhile(tickets)
        known = {place: token for place, token in zip(mine, tickets.tokens(), strict=True) if token is not None}
        left = [place for place in range(len(draws)) if place not in known]
        if left:
            found = self._draw(logits, [draws[place] for place in left], [rows[place] for place in left])
            known |= zip(left, found, strict=True)
        return [known[place] for place in range(len(draws))]

    def _draw(self, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[int]:
        """The same, by torch's operators."""
        work, asked = self._workspace(logits), dict(zip(rows, draws, strict=True))
        tokens: dict[int, int] = {}
        greedy: list[int] = []
        few: list[int] = []
        many: list[int] = []
        for row, draw in asked.items():
            sampling = draw.sampling
            kind = greedy if sampling.temperature == 0.0 else few if 0 < sampling.top_k <= _FEW else many
            kind.append(row)
        step = StepRows(work, logits, rows, asked)
        for block in step.blocks(greedy, CHUNK):
            found = highest(block.words, block.tops, block.which)[:, 0].tolist()
            tokens |= zip((greedy[place] for place in block.places), found, strict=True)
        if few:
            found, tied = _cut(work, step, asked, few)
            tokens |= zip(few, found, strict=True)
            many += [few[place] for place in tied]
        if many:
            tokens |= zip(many, Sieve(work, step, asked, many).tokens(), strict=True)
        return [tokens[row] for row in rows]

    @torch.inference_mode()
    def log_probabilities(
        self, logits: Tensor, tokens: Sequence[int], most: int, rows: Sequence[int] | None = None
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each row that of its token, and the `most` likeliest words with theirs, in nats.

        The likeliest comes first, and of equal ones the first word. `rows` are as for `draw`.
        """
        rows = range(len(logits)) if rows is None else rows
        work = self._workspace(logits)
        count = min(most, logits.shape[1])
        told: list[tuple[float, list[tuple[int, float]]]] = [(0.0, [])] * len(tokens)
        for block in StepRows(work, logits, rows).blocks(rows, work.width):
            words, tops = block.whole(), block.tops
            top = tops.amax(dim=-1, keepdim=True)
            totals = exact_weights(words, top, LOG2_E, work).sum(dim=-1).tolist()
            chosen = torch.tensor([tokens[row] for row in block.places], device=logits.device)[:, None]
            values, ids = _likeliest(words, tops, count)
            own = words.gather(1, chosen)[:, 0]
            columns = own.clamp(min=-HIGHEST), top[:, 0], ids, values.clamp(min=-HIGHEST)
            found = zip(block.places, totals, *(column.tolist() for column in columns), strict=True)
            for row, total, mine, high, best, theirs in found:
                norm = math.log(total)
                likeliest = [(word, value - high - norm) for word, value in zip(best, theirs, strict=True)]
                told[row] = mine - high - norm, likeliest
        return told

    def _workspace(self, logits: Tensor) -> Workspace:
        kept = self._kept
        if kept is None or (kept.vocabulary, kept.device) != (logits.shape[1], logits.device):
            self._kept = kept = Workspace(logits.shape[1], logits.device)
        return kept


def _cut(
    work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens of rows with a small top-k: what it keeps is cut out of them, and nothing else is looked at.

    And the places in `rows` of those in which more words are tied with the k-th than were cut out: what these say does
    not count.
    """
    mine = [draws[row] for row in rows]
    wanted = max(draw.sampling.top_k for draw in mine) + _ROOM_FOR_TIES
    count = min(-(-wanted // _STEP) * _STEP, work.width)
    width = -(-count // CHUNK) * CHUNK
    values = torch.full((len(rows), width), float("-inf"), dtype=torch.float32, device=work.device)
    ids = torch.zeros((len(rows), width), dtype=torch.int32, device=work.device)
    for block in step.blocks(rows, min(count * CHUNK, work.width)):
        best, found = highest_few(block.words, block.tops, count, block.which)
        values[list(block.places), :count], ids[list(block.places), :count] = best, found.to(torch.int32)
    last = torch.tensor([draw.sampling.top_k - 1 for draw in mine], device=work.device)[:, None]
    least = values.gather(1, last)
    tied = (values[:, count - 1 : count] == least) & (least > float("-inf")) & (count < work.width)
    values.masked_fill_(values < least, float("-inf"))
    contest = Contest(work, Asked.by(mine, work.device), values, ids, values[:, :1].clone())
    return contest.winners(), tied[:, 0].nonzero()[:, 0].tolist()


def _likeliest(words: Tensor, tops: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of rows with these peaks, and which words they are: in order."""
    found = min(count + _ROOM_FOR_TIES, words.shape[1])
    values, ids = _in_order(*highest_few(words, tops, found))
    if count and found < words.shape[1] and bool((values[:, count - 1] == values[:, -1]).any()):
        # More are tied with the last than there was room for, so that the first of them may be missing.
        values, ids = words.sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Highest first, and of equal ones the first word first."""
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
