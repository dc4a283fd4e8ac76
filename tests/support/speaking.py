"""A real model that is told which tokens it samples: its end tokens, too, which no random model says when it should."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from torch import Tensor

from choreo_agents import Engine, Memory, PromptText
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import SampledToken, Sampler, SamplerCall
from support.checkpoints import Family, save_checkpoint


class OutputStream:
    """Chooses given tokens, those that a call forces in their place, and then the last of them again and again."""

    def __init__(self, call: SamplerCall, tokens: Sequence[int]) -> None:
        said = tokens if call.sampling.forced_token_ids is None else call.sampling.forced_token_ids
        self.constraint = None if call.constraint is None else call.constraint()
        self._call = call
        self._left = chain(said, repeat(said[-1] if said else 0))
        self._next: int | None = None

    def choose(self, logits: Tensor) -> SampledToken:
        if self._next is None:
            # What a constraint makes a model say, as where its thoughts have to end, comes before what is given.
            made = None if self.constraint is None else self.constraint.allowed()
            given = next(self._left)
            self._next = made[0] if isinstance(made, tuple) and len(made) == 1 else given
            if self._next != given:
                self._left = chain([given], self._left)
            if self._call.logits_callback is not None:
                self._call.logits_callback(logits)
        logprob = None if self._call.sampling.logprobs is None else float(logits.log_softmax(-1)[self._next])
        return SampledToken(self._next, logprob)

    def take(self, token: int) -> None:
        self._next = None
        if self.constraint is not None:
            self.constraint.take(token)

    def withdraw(self) -> None:
        pass


@contextmanager
def engine_that_says(
    family: Family, says: str | Callable[[str], str | PromptText], **memory: Any
) -> Iterator[tuple[Engine, list[str]]]:
    """An engine over a checkpoint of a family that says this, and a list of the prompts that it has read.

    Args:
        family: Its vocabulary, control tokens and chat template.
        says: Its answer, control tokens among it, or a function that makes it of the prompt.
        memory: Of the engine.
    """
    prompts: list[str] = []
    model = _loaded(family)

    def sampler(call: SamplerCall) -> Sampler:
        read = [token for _, tokens in call.view for token in tokens]
        prompts.append(model.decode([*read, *call.header]))
        return OutputStream(call, model.encode(says if isinstance(says, str) else says(prompts[-1])))

    with Engine.load(replace(model, sampler=sampler), memory=Memory(**{"kv_budget_bytes": 1 << 26} | memory)) as engine:
        yield engine, prompts
        engine.check()


_LOADED: dict[str, LoadedModel] = {}
"""By all that is real of a family: its name is not part of it."""


def _loaded(family: Family) -> LoadedModel:
    if (known := repr(family)) not in _LOADED:
        _LOADED[known] = load_model(save_checkpoint(Path(tempfile.mkdtemp(prefix="choreo-says-")), family))
    return _LOADED[known]


def speaking(model: LoadedModel, said: list[Sequence[int]]) -> LoadedModel:
    """The model, whose next decodes sample the tokens that the list then holds, one element each."""

    def sampler(call: SamplerCall) -> Sampler:
        return OutputStream(call, () if call.sampling.forced_token_ids is not None else said.pop(0))

    return replace(model, sampler=sampler)
