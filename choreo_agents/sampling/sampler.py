"""Samplers: the state of each request's sampling, and the draw of the next tokens of a batch."""

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
"""Largest top-k that is cut out of the row; above it, or with more ties than fit, the row is masked."""
_EXTRA_FOR_TIES = 32
_STEP = 32
"""Unit of the number of tokens that are cut out."""


@dataclass(frozen=True)
class SampledToken:
    """A sampled token, with the model's log-probabilities if they were requested."""

    token: int
    logprob: float | None = None
    """Log-probability of the token, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, likeliest first."""


class Sampler(Protocol):
    """Chooser of one request's tokens. `TokenSampler`s are drawn in one batch, others are called one by one."""

    constraint: AnswerConstraint | None
    """Restricts the tokens that may be chosen; None: any."""

    def choose(self, logits: Tensor) -> SampledToken:
        """Choose the next token for [vocabulary] logits.

        Must return the same if called again before `take`, by a step that is retried after a failure.
        """
        ...

    def take(self, token: int) -> None:
        """Accept the chosen token."""
        ...

    def withdraw(self) -> None:
        """Note that its request has ended early: refused with others of its batch, cancelled, or failed."""
        ...


@dataclass(frozen=True)
class SamplerCall:
    """The decode that a sampler is made for."""

    author: str | None
    """Name of the speaker."""
    view: tuple[tuple[str | None, tuple[int, ...]], ...]
    """Its view, in order: each message's author and tokens."""
    header: tuple[int, ...]
    """Tokens with which the answer starts."""
    sampling: Sampling
    constraint: Callable[[], AnswerConstraint] | None
    """Makes the constraint on its tokens; None: any may be chosen."""
    logits_callback: Callable[[Tensor], None] | None
    """Called with the logits before each choice."""


class TokenSampler:
    """Sampling state of one request: what it may choose next, and from which random numbers.

    The choice is the argmax of logits plus Gumbel noise, which is a sample from the softmax. A last-bit change of the
    logits (another batch shape) does not change it unless two tokens are nearly tied.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        seen: Iterable[int] = (),
        logits_callback: Callable[[Tensor], None] | None = None,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        """Set up the sampling of a request.

        Args:
            sampling: Sampling parameters.
            seed: Of the random numbers.
            seen: Tokens before the answer, for the repetition penalty.
            logits_callback: Called with the logits before each choice.
            constraint: Restricts the tokens that may be chosen; ignored with `forced_token_ids`.
        """
        self.sampling = sampling
        self.constraint = constraint if sampling.forced_token_ids is None else None
        self._seed = seed
        self._watch = logits_callback
        self._taken = 0
        self.played: tuple[int, ...] = ()
        """Tokens chosen in an earlier run of the same call, from the first on; they are chosen again."""
        self._is_shown = False
        """Whether the callback has seen the logits of the next token."""
        self._is_refused = False
        """Whether the constraint has refused a draw for the next token."""
        self._seen = tuple(seen) if sampling.repetition_penalty != 1.0 else ()
        self._counted: CountedTokens | None = None

    def choose(self, logits: Tensor) -> SampledToken:
        """Choose the next token for [vocabulary] logits: the same as in any batch, and on every call before `take`."""
        return choose_tokens([self], logits[None], BatchSampler())[0]

    def shown(self, logits: Tensor) -> None:
        """Pass the [vocabulary] logits of the next token to the callback, once."""
        if self._watch is not None and not self._is_shown:
            self._watch(logits)
        self._is_shown = True
        if self.sampling.penalises and self._counted is None:
            self._counted = CountedTokens(self.sampling, self._seen, logits.device)

    def forced(self) -> int | None:
        """Return the next token if it is forced or replayed, else None."""
        if self.sampling.forced_token_ids is not None:
            return self.sampling.forced_token_ids[self._taken]
        return self.played[self._taken] if self._taken < len(self.played) else None

    def draw(self, logits: Tensor) -> Draw:
        """Return how to draw from the [vocabulary] logits; every call before `take` uses the same random numbers."""
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
        """Return whether the constraint refuses a drawn token, so that another is drawn; at most once per position."""
        if self.constraint is None or self._is_refused:
            return False
        self._is_refused = self.constraint.refuses(token)
        return self._is_refused

    def take(self, token: int) -> None:
        """Accept the chosen token."""
        self._taken += 1
        self._is_shown = self._is_refused = False
        if self._counted is not None:
            self._counted.add(token)
        if self.constraint is not None:
            self.constraint.take(token)

    def withdraw(self) -> None:
        """Implement `Sampler`: there is nothing to release."""


def choose_tokens(
    samplers: Sequence[Sampler],
    logits: Tensor,
    batch: BatchSampler,
    meanwhile: Callable[[Tickets], None] | None = None,
) -> list[SampledToken]:
    """Choose the next token of each request, for [requests, vocabulary] logits; see `BatchSampler.draw`."""
    chosen: dict[int, SampledToken] = {}
    drawn: dict[int, TokenSampler] = {}
    tokens: dict[int, int] = {}
    for row, sampler in enumerate(samplers):
        if isinstance(sampler, TokenSampler):
            drawn[row] = sampler
            sampler.shown(logits[row])
        else:
            chosen[row] = sampler.choose(logits[row])
    todo = drawn
    while todo:
        forced = {row: token for row, sampler in todo.items() if (token := sampler.forced()) is not None}
        free = [row for row in todo if row not in forced]
        draws, then = [todo[row].draw(logits[row]) for row in free], meanwhile if len(free) == len(samplers) else None
        sampled = batch.draw(logits, draws, free, then) if free else []
        meanwhile = None
        tokens |= forced | dict(zip(free, sampled, strict=True))
        # After a refusal the constraint forces other tokens, and refuses no more in this position.
        todo = {row: sampler for row, sampler in todo.items() if sampler.refuses(tokens[row])}
    logprob_rows = [row for row, sampler in drawn.items() if sampler.sampling.logprobs is not None]
    chosen |= {row: SampledToken(token) for row, token in tokens.items()}
    if logprob_rows:
        most = [drawn[row].sampling.logprobs or 0 for row in logprob_rows]
        logprobs = batch.log_probabilities(logits, [tokens[row] for row in logprob_rows], max(most), logprob_rows)
        for row, count, (own, likeliest) in zip(logprob_rows, most, logprobs, strict=True):
            chosen[row] = SampledToken(tokens[row], own, tuple(likeliest[:count]))
    return [chosen[row] for row in range(len(samplers))]


def nth_seed(seed: int, number: int) -> int:
    """Derive the seed of one of several answers to a call; the first has the call's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")


class BatchSampler:
    """Sampler of all rows of a step together, on the device of the logits, in blocks of rows.

        logits ── penalties, masks ── peaks ┬─ temperature 0 ─────────────────────────────── the highest
                                            ├─ a small top-k ── its tokens ─────────────────┬─── Gumbel-max
                                            └─ else ── tokens that filters may keep ────────┘

    A row's choice does not depend on other rows: of the tokens that the filters keep, it is the one with the highest
    logit / temperature + Gumbel noise. Everything that decides it is the same in any batch: maxima, comparisons,
    integers, `elementary` functions, logarithms of single numbers (in no vector), and sums of weights that are rounded
    so that order does not matter. Bounds that only say where to look may have any precision, since they have a margin.
    Not thread-safe.

    Args:
        lottery: Draws most rows in one launch; None: all are drawn by torch's operators.
    """

    def __init__(self, lottery: Lottery | None = None) -> None:
        self._last_workspace: Workspace | None = None
        self._lottery = lottery

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[Tickets], None] | None = None,
    ) -> list[int]:
        """Draw a token for each of some rows of [rows, vocabulary] logits. NaN and -inf count as the lowest number.

        Args:
            logits: Not written to; rows that nothing changes are not copied.
            draws: Sampling settings of the rows.
            rows: The rows, in any order; None: all.
            meanwhile: Called with the tickets before waiting for the device, if they hold all rows' likely tokens.

        Raises:
            ArithmeticError: A row has no finite logit: the forward pass failed.
        """
        rows = range(len(logits)) if rows is None else rows
        if self._lottery is None:
            return self._draw(logits, draws, rows)
        plain = [place for place, draw in enumerate(draws) if not draw.changes]
        tickets = self._lottery.draw(logits, [rows[place] for place in plain], [draws[place] for place in plain])
        if tickets is None:
            return self._draw(logits, draws, rows)
        if meanwhile is not None and len(plain) == len(draws):
            meanwhile(tickets)
        tokens = {place: token for place, token in zip(plain, tickets.tokens(), strict=True) if token is not None}
        unsure = [place for place in range(len(draws)) if place not in tokens]
        if unsure:
            drawn = self._draw(logits, [draws[place] for place in unsure], [rows[place] for place in unsure])
            tokens |= zip(unsure, drawn, strict=True)
        return [tokens[place] for place in range(len(draws))]

    def _draw(self, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[int]:
        """Draw by torch's operators, as `draw`."""
        work, draw_of = self._workspace(logits), dict(zip(rows, draws, strict=True))
        tokens: dict[int, int] = {}
        greedy: list[int] = []
        few: list[int] = []
        many: list[int] = []
        for row, draw in draw_of.items():
            sampling = draw.sampling
            kind = greedy if sampling.temperature == 0.0 else few if 0 < sampling.top_k <= _FEW else many
            kind.append(row)
        step = StepRows(work, logits, rows, draw_of)
        for block in step.blocks(greedy, CHUNK):
            winners = highest(block.logits, block.tops, block.which)[:, 0].tolist()
            tokens |= zip((greedy[place] for place in block.places), winners, strict=True)
        if few:
            winners, tied = _draw_top_k(work, step, draw_of, few)
            tokens |= zip(few, winners, strict=True)
            many += [few[place] for place in tied]
        if many:
            tokens |= zip(many, NucleusFilter(work, step, draw_of, many).tokens(), strict=True)
        return [tokens[row] for row in rows]

    @torch.inference_mode()
    def log_probabilities(
        self, logits: Tensor, tokens: Sequence[int], most: int, rows: Sequence[int] | None = None
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return for each row the log-probability of its token, and the `most` likeliest tokens with theirs, in nats.

        The likeliest comes first; of equal ones, the lowest id. `rows` as for `draw`.
        """
        rows = range(len(logits)) if rows is None else rows
        work = self._workspace(logits)
        count = min(most, logits.shape[1])
        result: list[tuple[float, list[tuple[int, float]]]] = [(0.0, [])] * len(tokens)
        for block in StepRows(work, logits, rows).blocks(rows, work.width):
            whole, tops = block.whole(), block.tops
            top = tops.amax(dim=-1, keepdim=True)
            totals = exact_weights(whole, top, LOG2_E, work).sum(dim=-1).tolist()
            chosen = torch.tensor([tokens[row] for row in block.places], device=logits.device)[:, None]
            values, ids = _find_likeliest(whole, tops, count)
            own = whole.gather(1, chosen)[:, 0]
            columns = own.clamp(min=-HIGHEST), top[:, 0], ids, values.clamp(min=-HIGHEST)
            entries = zip(block.places, totals, *(column.tolist() for column in columns), strict=True)
            for row, total, logit, high, best, best_logits in entries:
                norm = math.log(total)
                likeliest = [(word, value - high - norm) for word, value in zip(best, best_logits, strict=True)]
                result[row] = logit - high - norm, likeliest
        return result

    def _workspace(self, logits: Tensor) -> Workspace:
        workspace = self._last_workspace
        if workspace is None or (workspace.vocabulary, workspace.device) != (logits.shape[1], logits.device):
            self._last_workspace = workspace = Workspace(logits.shape[1], logits.device)
        return workspace


def _draw_top_k(
    work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Draw tokens of rows with a small top-k, from its tokens alone.

    Also returns the indices in `rows` of rows with more ties with the k-th token than were cut out: their tokens are
    not valid.
    """
    row_draws = [draws[row] for row in rows]
    needed = max(draw.sampling.top_k for draw in row_draws) + _EXTRA_FOR_TIES
    count = min(-(-needed // _STEP) * _STEP, work.width)
    width = -(-count // CHUNK) * CHUNK
    values = torch.full((len(rows), width), float("-inf"), dtype=torch.float32, device=work.device)
    ids = torch.zeros((len(rows), width), dtype=torch.int32, device=work.device)
    for block in step.blocks(rows, min(count * CHUNK, work.width)):
        best, best_ids = highest_few(block.logits, block.tops, count, block.which)
        values[list(block.places), :count], ids[list(block.places), :count] = best, best_ids.to(torch.int32)
    last = torch.tensor([draw.sampling.top_k - 1 for draw in row_draws], device=work.device)[:, None]
    least = values.gather(1, last)
    tied = (values[:, count - 1 : count] == least) & (least > float("-inf")) & (count < work.width)
    values.masked_fill_(values < least, float("-inf"))
    gumbel_max = GumbelMax(work, DrawColumns.by(row_draws, work.device), values, ids, values[:, :1].clone())
    return gumbel_max.winners(), tied[:, 0].nonzero()[:, 0].tolist()


def _find_likeliest(logits: Tensor, tops: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest logits of rows with these peaks, and their token ids, both in order."""
    cut = min(count + _EXTRA_FOR_TIES, logits.shape[1])
    values, ids = _sort(*highest_few(logits, tops, cut))
    if count and cut < logits.shape[1] and bool((values[:, count - 1] == values[:, -1]).any()):
        # More are tied with the last than were cut out, so that the lowest ids may be missing.
        values, ids = logits.sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


def _sort(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by logit, descending, and then by token id."""
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
