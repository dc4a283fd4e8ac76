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
from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.elementary import LOG2_E
from choreo_agents.sampling.gumbel_max import Columns, GumbelMax, exact_weights, sums, surely_reached
from choreo_agents.sampling.kernel import DrawKernel, DrawnTokens
from choreo_agents.sampling.likeliest import CHUNK, highest, highest_few
from choreo_agents.sampling.noise import noise_key
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.penalties import CountedTokens
from choreo_agents.sampling.rows import HIGHEST, StepRows, Workspace

_FEW = 128
"""Tokens that are cut out of a row whose filters keep no more: from other rows, a token is drawn as they are."""
_EXTRA_FOR_TIES = 32
_EXPONENT_MARGIN = 0.01
"""Margin, in exponents of 2, far more than the error of fp32 in them."""


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
        self.replayed: tuple[int, ...] = ()
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

    def show(self, logits: Tensor) -> None:
        """Pass the [vocabulary] logits of the next token to the callback, once."""
        if self._watch is not None and not self._is_shown:
            self._watch(logits)
        self._is_shown = True
        if self.sampling.penalises and self._counted is None:
            self._counted = CountedTokens(self.sampling, self._seen, logits.device)

    def forced_token(self) -> int | None:
        """Return the next token if it is forced or replayed, else None."""
        if self.sampling.forced_token_ids is not None:
            return self.sampling.forced_token_ids[self._taken]
        return self.replayed[self._taken] if self._taken < len(self.replayed) else None

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
    meanwhile: Callable[[DrawnTokens], None] | None = None,
) -> list[SampledToken]:
    """Choose the next token of each request, for [requests, vocabulary] logits; see `BatchSampler.draw`."""
    chosen: dict[int, SampledToken] = {}
    drawn: dict[int, TokenSampler] = {}
    tokens: dict[int, int] = {}
    for row, sampler in enumerate(samplers):
        if isinstance(sampler, TokenSampler):
            drawn[row] = sampler
            sampler.show(logits[row])
        else:
            chosen[row] = sampler.choose(logits[row])
    todo = drawn
    while todo:
        forced = {row: token for row, sampler in todo.items() if (token := sampler.forced_token()) is not None}
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

        logits ── penalties, masks ── kernel, if any ── rows that it leaves ┬─ temperature 0 ──────────── the highest
                                                                            ├─ filters keep few tokens ┬─ Gumbel-max
                                                                            └─ else ── all tokens ─────┘

    A row's choice does not depend on other rows: of the tokens that the filters keep, it is the one with the highest
    logit / temperature + Gumbel noise. Everything that decides it is the same in any batch: maxima, comparisons,
    integers, `elementary` functions, logarithms of single numbers (in no vector), and sums of weights that are rounded
    so that order does not matter. Bounds that only say where to look may have any precision, since they have a margin.
    Not thread-safe.

    Args:
        kernel: Draws most rows in one launch; None: all are drawn by torch's operators.
    """

    def __init__(self, kernel: DrawKernel | None = None) -> None:
        self._last_workspace: Workspace | None = None
        self._kernel = kernel

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[DrawnTokens], None] | None = None,
    ) -> list[int]:
        """Draw a token for each of some rows of [rows, vocabulary] logits. NaN and -inf count as the lowest number.

        Args:
            logits: Not written to; rows that nothing changes are not copied.
            draws: Sampling settings of the rows.
            rows: The rows, in any order; None: all.
            meanwhile: Called with the tokens that the kernel draws before waiting for the device, if nothing changes
                any row's logits.

        Raises:
            ArithmeticError: A row has no finite logit: the forward pass failed.
        """
        rows = range(len(logits)) if rows is None else rows
        draw_of = dict(zip(rows, draws, strict=True))
        tokens: dict[int, int] = {}
        if self._kernel is not None and not self._kernel.failure:
            tokens = self._draw_by_kernel(self._kernel, logits, draw_of, meanwhile)
        left = {row: draw for row, draw in draw_of.items() if row not in tokens}
        if left:
            tokens |= self._draw_by_operators(logits, left)
        return [tokens[row] for row in rows]

    def _draw_by_kernel(
        self,
        kernel: DrawKernel,
        logits: Tensor,
        draws: Mapping[int, Draw],
        meanwhile: Callable[[DrawnTokens], None] | None,
    ) -> dict[int, int]:
        """Draw the tokens that a kernel decides with certainty; rows that are changed are drawn from copies."""
        plain = [row for row, draw in draws.items() if not draw.changes]
        # Of a row at temperature 0, a copy's peaks already say which token it is.
        changed = [row for row, draw in draws.items() if draw.changes and draw.sampling.temperature > 0.0]
        launched = [(plain, kernel.draw(logits, plain, [draws[row] for row in plain]))]
        if meanwhile is not None and len(plain) == len(draws) and launched[0][1] is not None:
            meanwhile(launched[0][1])
        if changed:
            step = StepRows(self._workspace(logits), logits, changed, draws)
            for block in step.blocks(changed, logits.shape[1]):
                rows, copy = [changed[place] for place in block.places], block.logits[:, : logits.shape[1]]
                launched.append((rows, kernel.draw(copy, range(len(rows)), [draws[row] for row in rows])))
        tokens: dict[int, int] = {}
        for rows, drawn in launched:
            if drawn is not None:
                tokens |= {row: token for row, token in zip(rows, drawn.tokens(), strict=True) if token is not None}
        return tokens

    def _draw_by_operators(self, logits: Tensor, draws: Mapping[int, Draw]) -> dict[int, int]:
        """Draw by torch's operators, as `draw`."""
        work = self._workspace(logits)
        tokens: dict[int, int] = {}
        greedy: list[int] = []
        cut: list[int] = []
        filtered: list[int] = []
        whole: list[int] = []
        for row, draw in draws.items():
            sampling = draw.sampling
            has_top_k = 0 < sampling.top_k < work.vocabulary
            if sampling.temperature == 0.0:
                greedy.append(row)
            elif has_top_k and sampling.top_k <= _FEW:
                cut.append(row)
            elif not has_top_k and (sampling.top_p < 1.0 or sampling.min_p > 0.0):
                filtered.append(row)
            else:
                whole.append(row)
        step = StepRows(work, logits, list(draws), draws)
        for block in step.blocks(greedy, CHUNK):
            winners = highest(block.logits, block.tops, block.which)[:, 0].tolist()
            tokens |= zip((greedy[place] for place in block.places), winners, strict=True)
        if cut:
            tokens |= _draw_top_k(work, step, draws, cut)
        if filtered:
            tokens |= _draw_likeliest(work, step, draws, filtered)
        whole += [row for row in (*cut, *filtered) if row not in tokens]
        for block in step.blocks(whole, work.width, cut=True):
            rows, top = [whole[place] for place in block.places], block.tops.amax(dim=-1, keepdim=True)
            contest = GumbelMax(work, [draws[row] for row in rows], block.whole(), work.ids, top)
            tokens |= zip(rows, contest.winners(), strict=True)
        return tokens

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


def _draw_top_k(work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]) -> dict[int, int]:
    """Draw for rows with a small top-k, from its tokens alone.

    Leaves out rows with more ties with the k-th token than were cut out.
    """
    most = [draws[row].sampling.top_k for row in rows]
    count = min(max(most) + _EXTRA_FOR_TIES, work.width)
    values, ids, _ = _cut_out(work, step, rows, count, None)
    least = values.gather(1, torch.tensor(most, device=work.device)[:, None] - 1)
    is_sure = (values[:, count - 1 : count] < least) | (least == float("-inf")) | (count == work.width)
    values.masked_fill_(values < least, float("-inf"))
    sure = is_sure[:, 0].nonzero()[:, 0].tolist()
    if not sure:
        return {}
    kept = [rows[place] for place in sure]
    contest = GumbelMax(work, [draws[row] for row in kept], values[sure], ids[sure], values[sure, :1])
    return dict(zip(kept, contest.winners(), strict=True))


def _draw_likeliest(work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]) -> dict[int, int]:
    """Draw for rows with a top-p or min-p, from their likeliest tokens alone.

    Leaves out rows whose filters may keep the last token that was cut out, or tokens after it.
    """
    count = _FEW + _EXTRA_FOR_TIES
    if count >= work.width:
        return {}
    columns = Columns.of([draws[row] for row in rows], work.device)
    values, ids, total = _cut_out(work, step, rows, count, columns)
    exponents = (values - values[:, :1]) * columns.scale
    last, least = values[:, count - 1 : count], exponents[:, count - 1 : count]
    is_sure = last == float("-inf")
    if columns.least is not None:
        is_sure |= least < columns.least
    if columns.top_p is not None:
        # With a margin, so that no token that was not cut out is as likely as these when computed exactly.
        before = torch.where(exponents > least + _EXPONENT_MARGIN, torch.exp2(exponents), 0.0)
        is_sure |= sums(before) >= surely_reached(total, columns.top_p)
    values.masked_fill_(values <= last, float("-inf"))
    sure = is_sure[:, 0].nonzero()[:, 0].tolist()
    if not sure:
        return {}
    kept = [rows[place] for place in sure]

    def whole(place: int) -> tuple[Tensor, Tensor]:
        [block] = step.blocks([kept[place]], work.width)
        return block.whole(), work.ids

    contest = GumbelMax(
        work, [draws[row] for row in kept], values[sure], ids[sure], values[sure, :1], whole, total[sure]
    )
    return dict(zip(kept, contest.winners(), strict=True))


def _cut_out(
    work: Workspace, step: StepRows, rows: Sequence[int], count: int, columns: Columns | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` highest logits of each row, descending and padded to whole chunks, and their token ids.

    Also returns the approximate sum of all weights of each row, [rows, 1], if `columns` holds a top-p.
    """
    shape = len(rows), -(-count // CHUNK) * CHUNK
    values = torch.full(shape, float("-inf"), dtype=torch.float32, device=work.device)
    ids = torch.zeros(shape, dtype=torch.int32, device=work.device)
    total = torch.ones(len(rows), 1, dtype=torch.float32, device=work.device)
    has_top_p = columns is not None and columns.top_p is not None
    for block in step.blocks(rows, work.width if has_top_p else min(count * CHUNK, work.width)):
        places = list(block.places)
        best, best_ids = highest_few(block.logits, block.tops, count, block.which)
        values[places, :count], ids[places, :count] = best, best_ids.to(torch.int32)
        if columns is not None and columns.top_p is not None:
            whole = block.whole()
            weights = torch.sub(whole, best[:, :1], out=work.like("weights", whole)).mul_(columns.scale[places])
            total[places] = sums(torch.exp2(weights, out=weights))
    return values, ids, total


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
