"""A real model that is told which tokens it samples: its end tokens, too, which no random model says when it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

from torch import Tensor

from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Chosen, Sampler, SamplerCall


class Speaking:
    """Chooses given tokens, those that a call forces in their place, and then the last of them again and again."""

    def __init__(self, call: SamplerCall, tokens: Sequence[int]) -> None:
        said = tokens if call.sampling.forced is None else call.sampling.forced
        self.guide = None if call.guide is None else call.guide()
        self._call = call
        self._left = chain(said, repeat(said[-1] if said else 0))
        self._next: int | None = None

    def choose(self, logits: Tensor) -> Chosen:
        if self._next is None:
            self._next = next(self._left)
            if self._call.watch is not None:
                self._call.watch(logits)
        logprob = None if self._call.sampling.logprobs is None else float(logits.log_softmax(-1)[self._next])
        return Chosen(self._next, logprob)

    def take(self, token: int) -> None:
        self._next = None
        if self.guide is not None:
            self.guide.take(token)

    def withdraw(self) -> None:
        pass


def speaking(model: LoadedModel, said: list[Sequence[int]]) -> LoadedModel:
    """The model, whose next decodes sample the tokens that the list then holds, one element each."""

    def sampler(call: SamplerCall) -> Sampler:
        return Speaking(call, () if call.sampling.forced is not None else said.pop(0))

    return replace(model, sampler=sampler)
