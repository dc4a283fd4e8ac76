"""Samplers: the state of each request's sampling, and the draw of the next tokens of a batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.sampling.constraints import AnswerConstraint
from choreo_agents.sampling.draw import (
    HIGHEST,
    LOG2_E,
    CountedTokens,
    Draw,
    bound_of_highest,
    draw_token,
    drawn_row,
    drawn_rows,
    exact_weights,
)
from choreo_agents.sampling.kernel import DrawKernel, DrawnTokens
from choreo_agents.sampling.noise import noise_key
from choreo_agents.sampling.parameters import Sampling

_TOGETHER = 16
"""Rows that are copied together: few enough for little memory, many enough for few launches."""
_PLAIN = Draw(Sampling())
"""Settings that change no logits."""


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
    """Sampler of all rows of a step together, on the device of the logits.

        logits ── penalties, masks ── kernel, if any ── rows that it leaves, one by one: Gumbel-max

    A row's choice does not depend on other rows: of the tokens that the filters keep, it is the one with the highest
    logit / temperature + Gumbel noise.

    Args:
        kernel: Draws most rows in one launch; None: all are drawn one by one.
    """

    def __init__(self, kernel: DrawKernel | None = None) -> None:
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
            logits: Not written to; rows that nothing changes are not copied for a kernel.
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
        for row, draw in draw_of.items():
            if row not in tokens:
                tokens[row] = draw_token(drawn_row(logits, row, draw), draw)
        return [tokens[row] for row in rows]

    def _draw_by_kernel(
        self,
        kernel: DrawKernel,
        logits: Tensor,
        draws: Mapping[int, Draw],
        meanwhile: Callable[[DrawnTokens], None] | None,
    ) -> dict[int, int]:
        """Draw the tokens that a kernel decides with certainty; rows that are changed are drawn from copies."""
        changed = [row for row, draw in draws.items() if draw.changes or not kernel.takes(logits)]
        plain = list(draws) if not changed else [row for row in draws if row not in set(changed)]
        launched = [(plain, kernel.draw(logits, plain, [draws[row] for row in plain]))]
        if meanwhile is not None and not changed and launched[0][1] is not None:
            meanwhile(launched[0][1])
        for first in range(0, len(changed), _TOGETHER):
            rows = changed[first : first + _TOGETHER]
            settings = [draws[row] for row in rows]
            copy = drawn_rows(logits, rows, settings)
            launched.append((rows, kernel.draw(copy, range(len(rows)), settings)))
        tokens: dict[int, int] = {}
        for rows, drawn in launched:
            if drawn is not None:
                tokens |= {row: token for row, token in zip(rows, drawn.tokens(), strict=True) if token is not None}
        return tokens

    @torch.inference_mode()
    def log_probabilities(
        self, logits: Tensor, tokens: Sequence[int], most: int, rows: Sequence[int] | None = None
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return for each row the log-probability of its token, and the `most` likeliest tokens with theirs, in nats.

        The likeliest comes first; of equal ones, the lowest id. `rows` as for `draw`.
        """
        result: list[tuple[float, list[tuple[int, float]]]] = []
        for place, row in enumerate(range(len(logits)) if rows is None else rows):
            own = drawn_row(logits, row, _PLAIN)
            high, norm = float(own.max()), math.log(float(exact_weights(own, own.max(), LOG2_E).sum()))
            near: list[tuple[int, float]] = []
            if most:
                ids = (own >= bound_of_highest(own, most)).nonzero()[:, 0]
                near = list(zip(ids.tolist(), own[ids].tolist(), strict=True))
            # Sorting is stable: of equal ones, the lowest id comes first.
            best = sorted(near, key=lambda word: -word[1])[:most]
            # The highest logit is subtracted first: a sum with a huge one would lose the norm.
            logprob = max(float(own[tokens[place]]), -HIGHEST) - high - norm
            result.append((logprob, [(token, max(logit, -HIGHEST) - high - norm) for token, logit in best]))
        return result
