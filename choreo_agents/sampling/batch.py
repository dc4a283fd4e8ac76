"""The next tokens of all rows of a step, drawn together.

    logits ── penalties, masks ── peaks ┬─ temperature 0 ─────────────────────────────────── the highest
                                        ├─ a small top-k ── the words that it keeps ────┬─── contest
                                        └─ else ── the chunks that filters do not rule out ─┘

A row's choice is defined without reference to others: of the words that the filters keep, the one whose logit over
temperature plus Gumbel noise is highest. Everything that decides it is exact or correctly rounded, word by word:
maxima, comparisons, integers, `elementary` functions, and sums of weights that are rounded so that no order changes
them. What only says where to look may be in any precision, for it leaves a margin.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from choreo_agents.sampling.contest import Contest
from choreo_agents.sampling.elementary import LOG2_E, log
from choreo_agents.sampling.likeliest import CHUNK, highest, highest_few, in_chunks, peaks, words_of
from choreo_agents.sampling.noise import NoiseKey
from choreo_agents.sampling.nucleus import Nucleus, exact_weights, sums, surely_reached
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.penalties import Penalties
from choreo_agents.sampling.workspace import Workspace

_FEW = 128
"""A top-k up to here is cut out of the row; beyond, and with more ties than there is room for, the row is masked."""
_ROOM_FOR_TIES = 64
_HIGHEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Draw:
    """What one row asks for."""

    sampling: Sampling
    noise: NoiseKey = (0, 0, 0, 0)
    """Of nothing if the temperature is 0."""
    mask: Tensor | None = None
    """Which words may be chosen, one of them at least: bool, [vocabulary]. None: any."""
    penalties: Penalties | None = None
    """Come before the mask. None: none."""


@dataclass(frozen=True)
class _Asked:
    """What some rows ask for."""

    draws: Sequence[Draw]
    scale: Tensor
    """From logits to exponents of 2: fp32, [rows, 1]."""
    top_p: Tensor | None
    """Doubles, [rows, 1]; None if no row has one."""
    least: Tensor | None
    """The exponents that min-p asks for, likewise, in fp32."""

    @staticmethod
    def by(draws: Sequence[Draw], device: torch.device) -> _Asked:
        wanted = [draw.sampling for draw in draws]
        scale = [min(max(LOG2_E / each.temperature, 2.0**-100), 2.0**100) for each in wanted]
        least = [math.log2(each.min_p) if each.min_p else -math.inf for each in wanted]
        columns = torch.tensor([scale, [each.top_p for each in wanted], least], dtype=torch.float64).to(device)
        scales, top_p, least_exponents = columns[..., None]
        return _Asked(
            draws,
            scales.to(torch.float32),
            top_p if any(each.top_p < 1.0 for each in wanted) else None,
            least_exponents.to(torch.float32) if any(each.min_p for each in wanted) else None,
        )

    def of(self, rows: Sequence[int]) -> _Asked:
        """What some of the rows ask for."""
        where = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else list(rows)
        top_p, least = (None if column is None else column[where] for column in (self.top_p, self.least))
        return _Asked([self.draws[row] for row in rows], self.scale[where], top_p, least)


class BatchSampler:
    """Draws tokens on the device of the logits, in blocks of rows. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: Workspace | None = None

    @torch.inference_mode()
    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """A token for each row of [rows, vocabulary] logits. What is not a number is the lowest, and so is -inf."""
        work = self._workspace(logits)
        tokens = [-1] * len(draws)
        greedy: list[int] = []
        few: list[int] = []
        many: list[int] = []
        for row, draw in enumerate(draws):
            sampling = draw.sampling
            kind = greedy if sampling.temperature == 0.0 else few if 0 < sampling.top_k <= _FEW else many
            kind.append(row)
        for rows in _blocks(greedy, work):
            words = _written(work, logits, rows, [draws[row] for row in rows])
            _put(tokens, rows, highest(words, peaks(words))[:, 0].tolist())
        if few:
            contest, tied = _of_few(work, logits, draws, few)
            _put(tokens, few, contest.winners(work))
            many += [few[place] for place in tied]
        if many:
            _put(tokens, many, _of_many(work, logits, draws, many))
        return tokens

    @torch.inference_mode()
    def log_probabilities(
        self, logits: Tensor, tokens: Sequence[int], most: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each row that of its token, and the `most` likeliest words with theirs, in nats.

        The likeliest comes first, and of equal ones the first word.
        """
        work = self._workspace(logits)
        count = min(most, logits.shape[1])
        told: list[tuple[float, list[tuple[int, float]]]] = []
        for rows in _blocks(range(len(tokens)), work):
            words = _written(work, logits, rows)
            tops = peaks(words)
            top = tops.amax(dim=-1, keepdim=True)
            totals = exact_weights(words, top, LOG2_E, work).sum(dim=-1).tolist()
            chosen = torch.tensor([tokens[row] for row in rows], device=logits.device)[:, None]
            values, ids = _in_order(*highest_few(words, tops, min(count + _ROOM_FOR_TIES, work.width)))
            columns = words.gather(1, chosen)[:, 0], top[:, 0], ids[:, :count], values[:, :count]
            for total, own, high, best, theirs in zip(totals, *(column.tolist() for column in columns), strict=True):
                norm = log(total)
                likeliest = [(word, value - high - norm) for word, value in zip(best, theirs, strict=True)]
                told.append((own - high - norm, likeliest))
        return told

    def _workspace(self, logits: Tensor) -> Workspace:
        kept = self._kept
        if kept is None or (kept.vocabulary, kept.device) != (logits.shape[1], logits.device):
            self._kept = kept = Workspace(logits.shape[1], logits.device)
        return kept


def _blocks(rows: Sequence[int], work: Workspace) -> Iterator[Sequence[int]]:
    for first in range(0, len(rows), work.rows):
        yield rows[first : first + work.rows]


def _put(tokens: list[int], rows: Sequence[int], found: Sequence[int]) -> None:
    for row, token in zip(rows, found, strict=True):
        tokens[row] = token


def _written(work: Workspace, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw] = ()) -> Tensor:
    """Some rows' logits as they are drawn from: penalised, masked, and numbers all of them; until the next are."""
    first, last = rows[0], rows[-1] + 1
    words = work.room("logits", len(rows), work.width)
    own = words[:, : work.vocabulary]
    own.copy_(logits[first:last] if last - first == len(rows) else logits[list(rows)])
    own.nan_to_num_(nan=-_HIGHEST, posinf=_HIGHEST, neginf=-_HIGHEST)
    words[:, work.vocabulary :] = float("-inf")
    for one, draw in zip(own, draws, strict=False):
        if draw.penalties is not None:
            draw.penalties.apply_(one)
        if draw.mask is not None:
            one.masked_fill_(~draw.mask, float("-inf"))
    return words


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Highest first, and of equal ones the first word first."""
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _of_few(work: Workspace, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> tuple[Contest, list[int]]:
    """Rows with a small top-k, and the places in `rows` of those where more words are tied than were cut out."""
    mine = [draws[row] for row in rows]
    wanted = max(draw.sampling.top_k for draw in mine) + _ROOM_FOR_TIES
    count = min(-(-wanted // CHUNK) * CHUNK, work.width)
    cut: list[tuple[Tensor, Tensor]] = []
    for block in _blocks(rows, work):
        words = _written(work, logits, block, [draws[row] for row in block])
        cut.append(highest_few(words, peaks(words), count))
    values, found = (torch.cat(parts) for parts in zip(*cut, strict=True))
    last = torch.tensor([draw.sampling.top_k - 1 for draw in mine], device=logits.device)[:, None]
    least = values.gather(1, last)
    tied = (values[:, -1:] == least) & (least > float("-inf")) & (count < work.width)
    values, ids = values.masked_fill(values < least, float("-inf")), found.to(torch.int32)
    asked, top = _Asked.by(mine, logits.device), values[:, :1]
    field = _Field(values, ids, top)
    if asked.top_p is not None:
        weights = torch.exp2((values - top) * asked.scale)
        field = replace(field, weights=weights, total=sums(weights))
    return _contest(field, asked, lambda row: (values[row : row + 1], ids[row])), tied[:, 0].nonzero()[:, 0].tolist()


def _of_many(work: Workspace, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[int]:
    """Tokens of rows whose filters may leave any number of words."""
    tokens = [-1] * len(rows)
    asked = _Asked.by([draws[row] for row in rows], logits.device)
    waiting: dict[int, list[tuple[Sequence[int], _Field]]] = defaultdict(list)

    def whole(places: Sequence[int]) -> Tensor:
        mine = [asked.draws[place] for place in places]
        words = _written(work, logits, [rows[place] for place in places], mine)
        for own, draw in zip(words, mine, strict=True):
            top_k = draw.sampling.top_k
            if 0 < top_k < work.vocabulary:
                own.masked_fill_(own < own.topk(top_k).values[-1], float("-inf"))
        return words

    def decide(some: Sequence[tuple[Sequence[int], _Field]]) -> None:
        places = [place for mine, _ in some for place in mine]
        field = _joined([field for _, field in some])
        own = field.logits if field.logits.shape[1] == work.width else None
        contest = _contest(
            field,
            asked.of(places),
            lambda row: (whole(places[row : row + 1]) if own is None else own[row : row + 1], work.ids),
        )
        _put(tokens, places, contest.winners(work))

    for places in _blocks(range(len(rows)), work):
        words = whole(places)
        field = _field(work, words, asked.of(places))
        if field.logits is words:
            # The next block is written where this one is.
            decide([(places, field)])
            continue
        width = field.logits.shape[1]
        waiting[width].append((places, field))
        if sum(len(mine) for mine, _ in waiting[width]) * width >= work.rows * work.width:
            decide(waiting.pop(width))
    for some in waiting.values():
        decide(some)
    return tokens


@dataclass(frozen=True)
class _Field:
    """The words of some rows that a contest is about: each [rows, words]."""

    logits: Tensor
    ids: Tensor
    top: Tensor
    weights: Tensor | None = None
    """See `Nucleus`."""
    total: Tensor | None = None


def _contest(field: _Field, asked: _Asked, whole: Callable[[int], tuple[Tensor, Tensor]]) -> Contest:
    nucleus = None
    if asked.top_p is not None:
        assert field.weights is not None and field.total is not None
        nucleus = Nucleus(field.weights, field.total, asked.top_p, whole)
    temperatures, noise = [d.sampling.temperature for d in asked.draws], [d.noise for d in asked.draws]
    return Contest(field.logits, field.ids, field.top, temperatures, noise, asked.scale, asked.least, nucleus)


def _joined(fields: Sequence[_Field]) -> _Field:
    if len(fields) == 1:
        return fields[0]

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there) if there else None

    logits, ids, top = (torch.cat(parts) for parts in zip(*((f.logits, f.ids, f.top) for f in fields), strict=True))
    return _Field(logits, ids, top, joined([f.weights for f in fields]), joined([f.total for f in fields]))


def _field(work: Workspace, words: Tensor, asked: _Asked) -> _Field:
    """The chunks of some rows that filters do not rule out: of these very words, if there is none that they do."""
    tops = peaks(words)
    top = tops.amax(dim=-1, keepdim=True)
    whole = _Field(words, work.ids, top)
    if asked.top_p is None and asked.least is None:
        return whole
    exponents, order = ((tops - top) * asked.scale).sort(dim=1, descending=True)
    may = torch.ones_like(exponents, dtype=torch.bool) if asked.least is None else exponents >= asked.least
    if asked.top_p is not None:
        own = torch.sub(words, top, out=work.like("weights", words)).mul_(asked.scale)
        weights = torch.exp2(own, out=own)
        total = sums(weights)
        whole = replace(whole, weights=weights, total=total)
        # The likeliest words of chunks are words: where they make up a nucleus, the other chunks hold none of it.
        theirs = torch.exp2(exponents)
        may &= theirs.cumsum(dim=1) - theirs < surely_reached(total, asked.top_p)
    # So many that other rows' are as many.
    count = 1 << (int(may.sum(dim=1).amax()) - 1).bit_length()
    if count >= tops.shape[1]:
        return whole
    places = order[:, :count]
    left = None if whole.weights is None else in_chunks(whole.weights, places)
    return replace(whole, logits=in_chunks(words, places), ids=words_of(places).to(torch.int32), weights=left)
