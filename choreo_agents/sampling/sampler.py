"""The choice of tokens, request by request and step by step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.sampling.constraints.base import AnswerConstraint
from choreo_agents.sampling.draw import Draw, DrawColumns
from choreo_agents.sampling.elementary import LOG2_E
from choreo_agents.sampling.gumbel_max import GumbelMax, exact_weights
from choreo_agents.sampling.likeliest import CHUNK, highest, highest_few
from choreo_agents.sampling.lottery import Lottery, Tickets
from choreo_agents.sampling.noise import noise_key
from choreo_agents.sampling.nucleus_filter import NucleusFilter
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.penalties import CountedTokens
from choreo_agents.sampling.rows import HIGHEST, StepRows
from choreo_agents.sampling.workspace import Workspace

_FEW = 128
"""A top-k up to here is cut out of the row; beyond, and with more ties than there is room for, the row is masked."""
_ROOM_FOR_TIES = 32
_STEP = 32
"""Of how many words are cut out."""


@dataclass(frozen=True)
class SampledToken:
    """A token that was sampled, with the model's log-probabilities in its place if they were asked for."""

    token: int
    logprob: float | None = None
    """Its own, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first."""


class Sampler(Protocol):
    """Chooses the tokens of one request. A `TokenSampler` is served together with others, any other asked by itself."""

    constraint: AnswerConstraint | None
    """Says which may be chosen; None: any."""

    def choose(self, logits: Tensor) -> SampledToken:
        """The next token for [vocabulary] logits.

        Asked again before `take`, by a step that is run again after a failure, it says the same.
        """
        ...

    def take(self, token: int) -> None:
        """Go on with what was chosen."""
        ...

    def withdraw(self) -> None:
        """What it was made for goes no further: refused with others of its batch, cancelled, or failed."""
        ...


@dataclass(frozen=True)
class SamplerCall:
    """The decode that a sampler is made for."""

    author: str | None
    """Who speaks."""
    view: tuple[tuple[str | None, tuple[int, ...]], ...]
    """What it sees from the start on: each message's author and tokens."""
    header: tuple[int, ...]
    """What it starts with."""
    sampling: Sampling
    constraint: Callable[[], AnswerConstraint] | None
    """Makes what says which tokens may be chosen; None: any may."""
    logits_callback: Callable[[Tensor], None] | None
    """To be shown the logits before each choice."""


class TokenSampler:
    """How far one request is: what it may choose next, and from which random numbers.

    The choice is the argmax of logits plus Gumbel noise: a sample from the softmax that a last-bit change of the
    logits (another batch shape) leaves as it is unless two tokens are all but tied.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        seen: Iterable[int] = (),
        logits_callback: Callable[[Tensor], None] | None = None,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        """Random numbers are those of `seed`; `seen` are the tokens before the answer, for the repetition penalty.

        `watch` is shown the logits before each choice. `constraint` says which tokens may be chosen; forced ones
        always.
        """
        self.sampling = sampling
        self.constraint = constraint if sampling.forced_token_ids is None else None
        self._seed = seed
        self._watch = logits_callback
        self._taken = 0
        self.played: tuple[int, ...] = ()
        """What was chosen when the same was asked before, from the first token on: it is chosen again."""
        self._is_shown = False
        """Whether the logits before the next token were."""
        self._is_refused = False
        """Whether the next token is not to be an end that was chosen first."""
        self._seen = tuple(seen) if sampling.repetition_penalty != 1.0 else ()
        self._counted: CountedTokens | None = None

    def choose(self, logits: Tensor) -> SampledToken:
        """The next token for [vocabulary] logits: the same as in any batch, and if it is asked again before `take`."""
        return choose_tokens([self], logits[None], BatchSampler())[0]

    def shown(self, logits: Tensor) -> None:
        """Look, once, at the [vocabulary] logits that the next token is chosen from."""
        if self._watch is not None and not self._is_shown:
            self._watch(logits)
        self._is_shown = True
        if self.sampling.penalises and self._counted is None:
            self._counted = CountedTokens(self.sampling, self._seen, logits.device)

    def forced(self) -> int | None:
        """The next token, if it is not to be chosen."""
        if self.sampling.forced_token_ids is not None:
            return self.sampling.forced_token_ids[self._taken]
        return self.played[self._taken] if self._taken < len(self.played) else None

    def draw(self, logits: Tensor) -> Draw:
        """What is to be drawn from the [vocabulary] logits. Asked again, it draws from the same random numbers."""
        mask, allowed = None, None if self.constraint is None else self.constraint.allowed()
        if isinstance(allowed, Tensor):
            mask = allowed.to(logits.device)
        elif allowed is not None:
            assert allowed, "a constraint must allow a token"
            mask = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            mask[list(allowed)] = True
        penalties = None if self._counted is None else self._counted.penalties()
        return Draw(self.sampling, noise_key(self._seed, self._taken), mask, penalties)

    def refuses(self, token: int) -> bool:
        """Whether the constraint wants another token in the place of the one that was drawn; not twice in one place."""
        if self.constraint is None or self._is_refused:
            return False
        self._is_refused = self.constraint.refuses(token)
        return self._is_refused

    def take(self, token: int) -> None:
        """Go on with what was chosen."""
        self._taken += 1
        self._is_shown = self._is_refused = False
        if self._counted is not None:
            self._counted.add(token)
        if self.constraint is not None:
            self.constraint.take(token)

    def withdraw(self) -> None:
        """See `Sampler`: what it knows concerns nobody else."""


def choose_tokens(
    samplers: Sequence[Sampler],
    logits: Tensor,
    batch: BatchSampler,
    meanwhile: Callable[[Tickets], None] | None = None,
) -> list[SampledToken]:
    """The next token of each request, for [requests, vocabulary] logits in the same order; see `BatchSampler.draw`."""
    chosen: dict[int, SampledToken] = {}
    drawn: dict[int, TokenSampler] = {}
    tokens: dict[int, int] = {}
    for row, sampler in enumerate(samplers):
        if isinstance(sampler, TokenSampler):
            drawn[row] = sampler
            sampler.shown(logits[row])
        else:
            chosen[row] = sampler.choose(logits[row])
    left = drawn
    while left:
        forced = {row: token for row, sampler in left.items() if (token := sampler.forced()) is not None}
        free = [row for row in left if row not in forced]
        draws, then = [left[row].draw(logits[row]) for row in free], meanwhile if len(free) == len(samplers) else None
        found = batch.draw(logits, draws, free, then) if free else []
        meanwhile = None
        tokens |= forced | dict(zip(free, found, strict=True))
        # Who is refused what was drawn is led elsewhere, and cannot be refused again.
        left = {row: sampler for row, sampler in left.items() if sampler.refuses(tokens[row])}
    asked = [row for row, sampler in drawn.items() if sampler.sampling.logprobs is not None]
    chosen |= {row: SampledToken(token) for row, token in tokens.items()}
    if asked:
        most = [drawn[row].sampling.logprobs or 0 for row in asked]
        told = batch.log_probabilities(logits, [tokens[row] for row in asked], max(most), asked)
        for row, count, (own, likeliest) in zip(asked, most, told, strict=True):
            chosen[row] = SampledToken(tokens[row], own, tuple(likeliest[:count]))
    return [chosen[row] for row in range(len(samplers))]


def nth_seed(seed: int, number: int) -> int:
    """The seed of one of several answers to a call: the first has the call's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")


class BatchSampler:
    """Draws the next tokens of all rows of a step together, on the device of the logits, in blocks of rows.

        logits ── penalties, masks ── peaks ┬─ temperature 0 ─────────────────────────────── the highest
                                            ├─ a small top-k ── the words that it keeps ────┬─── contest
                                            └─ else ── the words that filters may leave ────┘

    A row's choice is defined without reference to others: of the words that the filters keep, the one whose logit over
    temperature plus Gumbel noise is highest. Everything that decides it is the same in any batch: maxima, comparisons,
    integers, `elementary` functions, logarithms of single numbers, which stand in no vector, and sums of weights that
    are rounded so that no order changes them. What only says where to look may be in any precision, for it leaves a
    margin. For one thread at a time.

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
            tokens |= zip(many, NucleusFilter(work, step, asked, many).tokens(), strict=True)
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
    contest = GumbelMax(work, DrawColumns.by(mine, work.device), values, ids, values[:, :1].clone())
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
