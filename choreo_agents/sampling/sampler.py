"""The choice of tokens, request by request and step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.sampling.batch import BatchSampler
from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.guiding.guides import Guide
from choreo_agents.sampling.lottery import Tickets
from choreo_agents.sampling.noise import noise_key
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.penalties import CountedTokens


@dataclass(frozen=True)
class Chosen:
    """A token that was sampled, with the model's log-probabilities in its place if they were asked for."""

    token: int
    logprob: float | None = None
    """Its own, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first."""


class Sampler(Protocol):
    """Chooses the tokens of one request. A `TokenSampler` is served together with others, any other asked by itself."""

    guide: Guide | None
    """Says which may be chosen; None: any."""

    def choose(self, logits: Tensor) -> Chosen:
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
    guide: Callable[[], Guide] | None
    """Makes what says which tokens may be chosen; None: any may."""
    watch: Callable[[Tensor], None] | None
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
        watch: Callable[[Tensor], None] | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Random numbers are those of `seed`; `seen` are the tokens before the answer, for the repetition penalty.

        `watch` is shown the logits before each choice. `guide` says which tokens may be chosen; forced ones always.
        """
        self.sampling = sampling
        self.guide = guide if sampling.forced is None else None
        self._seed = seed
        self._watch = watch
        self._taken = 0
        self.played: tuple[int, ...] = ()
        """What was chosen when the same was asked before, from the first token on: it is chosen again."""
        self._is_shown = False
        """Whether the logits before the next token were."""
        self._is_refused = False
        """Whether the next token is not to be an end that was chosen first."""
        self._seen = tuple(seen) if sampling.repetition_penalty != 1.0 else ()
        self._counted: CountedTokens | None = None

    def choose(self, logits: Tensor) -> Chosen:
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
        if self.sampling.forced is not None:
            return self.sampling.forced[self._taken]
        return self.played[self._taken] if self._taken < len(self.played) else None

    def draw(self, logits: Tensor) -> Draw:
        """What is to be drawn from the [vocabulary] logits. Asked again, it draws from the same random numbers."""
        mask, allowed = None, None if self.guide is None else self.guide.allowed()
        if isinstance(allowed, Tensor):
            mask = allowed.to(logits.device)
        elif allowed is not None:
            assert allowed, "a guide must allow a token"
            mask = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            mask[list(allowed)] = True
        penalties = None if self._counted is None else self._counted.penalties()
        return Draw(self.sampling, noise_key(self._seed, self._taken), mask, penalties)

    def refuses(self, token: int) -> bool:
        """Whether the guide wants another token in the place of the one that was drawn; not twice in one place."""
        if self.guide is None or self._is_refused:
            return False
        self._is_refused = self.guide.refuses(token)
        return self._is_refused

    def take(self, token: int) -> None:
        """Go on with what was chosen."""
        self._taken += 1
        self._is_shown = self._is_refused = False
        if self._counted is not None:
            self._counted.add(token)
        if self.guide is not None:
            self.guide.take(token)

    def withdraw(self) -> None:
        """See `Sampler`: what it knows concerns nobody else."""


def choose_tokens(
    samplers: Sequence[Sampler],
    logits: Tensor,
    batch: BatchSampler,
    meanwhile: Callable[[Tickets], None] | None = None,
) -> list[Chosen]:
    """The next token of each request, for [requests, vocabulary] logits in the same order; see `BatchSampler.draw`."""
    chosen: dict[int, Chosen] = {}
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
    chosen |= {row: Chosen(token) for row, token in tokens.items()}
    if asked:
        most = [drawn[row].sampling.logprobs or 0 for row in asked]
        told = batch.log_probabilities(logits, [tokens[row] for row in asked], max(most), asked)
        for row, count, (own, likeliest) in zip(asked, most, told, strict=True):
            chosen[row] = Chosen(tokens[row], own, tuple(likeliest[:count]))
    return [chosen[row] for row in range(len(samplers))]


def nth_seed(seed: int, number: int) -> int:
    """The seed of one of several answers to a call: the first has the call's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")
