"""One request's choice of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.sampling.answers import AnswerGuide
from choreo_agents.sampling.filters import apply_filters, penalise
from choreo_agents.sampling.parameters import Sampling


@dataclass(frozen=True)
class Chosen:
    """A token that was sampled, with the model's log-probabilities in its place if they were asked for."""

    token: int
    logprob: float | None = None
    """Its own, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first."""


class Sampler(Protocol):
    """Chooses the tokens of one request."""

    guide: AnswerGuide | None
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
    guide: Callable[[], AnswerGuide] | None
    """Makes what says which tokens may be chosen; None: any may."""
    watch: Callable[[Tensor], None] | None
    """To be shown the logits before each choice."""


class TokenSampler:
    """Chooses the tokens of one request from its own random numbers.

    The choice is the argmax of logits plus Gumbel noise: a sample from the softmax that a last-bit change of the
    logits (another batch shape) leaves as it is unless two tokens are all but tied.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        seen: Iterable[int] = (),
        watch: Callable[[Tensor], None] | None = None,
        guide: AnswerGuide | None = None,
    ) -> None:
        """Start the random numbers at `seed`; `seen` are the tokens before the answer, for the repetition penalty.

        `watch` is shown the logits before each choice. `guide` says which tokens may be chosen; forced ones always.
        """
        self.sampling = sampling
        self.guide = guide if sampling.forced is None else None
        self._watch = watch
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._noise: dict[bool, Tensor] = {}
        """What was drawn for the next token, by whether an end was refused before: a step may be run again."""
        self._refused = False
        """Whether the next token is not to be an end that was chosen first."""
        self._watched = False
        """Whether the logits before the next token were shown."""
        self._taken = 0
        self._seen = set(seen) if sampling.repetition_penalty != 1.0 else set()

    def choose(self, logits: Tensor) -> Chosen:
        """The next token for [vocabulary] logits; the same if it is asked again before `take`."""
        sampling = self.sampling
        if self._watch is not None and not self._watched:
            self._watch(logits)
            self._watched = True
        token = sampling.forced[self._taken] if sampling.forced is not None else self._guided(logits)
        if sampling.logprobs is None:
            return Chosen(token)
        likely = logits.to(torch.float64).log_softmax(dim=-1)
        best = likely.topk(min(sampling.logprobs, len(likely)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Chosen(token, float(likely[token]), top)

    def withdraw(self) -> None:
        """See `Sampler`: what it knows concerns nobody else."""

    def take(self, token: int) -> None:
        """Go on with what was chosen."""
        self._taken += 1
        self._noise.clear()
        self._refused = self._watched = False
        if self.sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        if self.guide is not None:
            self.guide.take(token)

    def _guided(self, logits: Tensor) -> int:
        if self.guide is None:
            return self._sample(logits)
        if not self._refused:
            token = self._sample(logits, self.guide.allowed())
            self._refused = self.guide.refuses(token)
            if not self._refused:
                return token
        return self._sample(logits, self.guide.allowed())

    def _sample(self, logits: Tensor, allowed: Sequence[int] | None = None) -> int:
        """A token of [vocabulary] logits, or of the allowed ones alone: as if all others had a logit of -inf."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1.0:
            logits = penalise(logits.float(), self._seen, sampling.repetition_penalty)
        if allowed is None:
            return self._draw(logits)
        return allowed[self._draw(logits[torch.tensor(allowed, device=logits.device)])]

    def _draw(self, logits: Tensor) -> int:
        sampling = self.sampling
        if sampling.temperature == 0.0:
            return int(logits.max(dim=-1).indices)  # several times as fast as argmax in bf16
        kept = apply_filters(logits.cpu(), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if self._refused not in self._noise:
            uniform = torch.rand(kept.shape, generator=self._generator, dtype=torch.float64)
            self._noise[self._refused] = -(-(uniform.clamp_min(1e-300)).log()).log()
        return int((kept + self._noise[self._refused]).argmax())


def nth_seed(seed: int, number: int) -> int:
    """The seed of one of several answers to a call: the first has the call's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")
