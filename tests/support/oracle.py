"""The slow stepwise oracle: plain Hugging Face forwards only, in double precision, no rotation of anything.

A message's keys as another sees them, at another place, are those of encoding it there: at the positions it is shown
at, its own parents moved along. So the oracle encodes it there, and its parents, and theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from support.exact import TOLERANCE, doubled, exactly, plain_model


@dataclass(frozen=True, eq=False)
class OracleMessage:
    """A message's lineage."""

    tokens: tuple[int, ...]
    parents: tuple[OracleMessage, ...]
    offsets: tuple[int, ...]
    """Where its parents stood when it was encoded, ..."""
    native: int
    """... and where itself."""

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _States:
    keys: tuple[Tensor, ...]
    """Of each layer: [1, kv_heads, tokens, head_dim]."""
    values: tuple[Tensor, ...]
    logits: Tensor
    """[tokens, vocabulary]."""


class Oracle:
    def __init__(self, path: Path | str) -> None:
        self.model = doubled(plain_model(path))
        config = self.model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.window: int | None = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self.window = None
        body = inspect.getsource(inspect.getmodule(type(self.model)))
        self.masks_by_layer_type = "causal_mask_mapping" in body
        self._known: dict[tuple[OracleMessage, int], _States] = {}
        self._generated: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}
        """By what was given, and how many."""

    def encode(
        self,
        tokens: Sequence[int],
        parents: Sequence[OracleMessage],
        offsets: Sequence[int],
        new_offset: int,
    ) -> OracleMessage:
        """The message of `tokens` at `position` that sees `parents` at `offsets`."""
        return OracleMessage(tuple(tokens), tuple(parents), tuple(offsets), new_offset)

    def logits(self, message: OracleMessage) -> Tensor:
        """[tokens, vocabulary]."""
        return self._states(message, message.native).logits

    @exactly()
    def _states(self, message: OracleMessage, at: int) -> _States:
        """The message encoded at another place, everything that it sees moved along."""
        known = self._known.get((message, at))
        if known is not None:
            return known
        places = [offset + at - message.native for offset in message.offsets]
        seen = [self._states(parent, place) for parent, place in zip(message.parents, places, strict=True)]
        cache = DynamicCache()
        for layer in range(self.layers if seen else 0):
            keys = torch.cat([states.keys[layer] for states in seen], dim=2)
            cache.update(keys, torch.cat([states.values[layer] for states in seen], dim=2), layer)
        own = torch.arange(at, at + message.length)
        around = [
            torch.arange(place, place + parent.length) for parent, place in zip(message.parents, places, strict=True)
        ]
        out = self.model(
            input_ids=torch.tensor([message.tokens]),
            position_ids=own[None],
            attention_mask=self._masks(torch.cat([*around, own]), own, message),
            past_key_values=cache,
            use_cache=True,
        )
        past = sum(parent.length for parent in message.parents)
        keys = tuple(layer.keys[:, :, past:].clone() for layer in cache.layers)
        values = tuple(layer.values[:, :, past:].clone() for layer in cache.layers)
        self._known[message, at] = states = _States(keys, values, out.logits[0])
        return states

    def _masks(self, seen: Tensor, own: Tensor, message: OracleMessage) -> Tensor | dict[str, Tensor]:
        """Who sees what, [1, 1, own, seen]: parents whole, oneself causally, within the window."""
        count, past = len(own), len(seen) - len(own)
        hidden = torch.zeros(count, len(seen), dtype=torch.bool)
        hidden[:, past:] = torch.ones(count, count, dtype=torch.bool).triu(1)
        near = hidden if self.window is None else hidden | (own[:, None] - seen[None, :] >= self.window)
        full, sliding = (
            torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, torch.finfo(torch.float64).min)[None, None]
            for mask in (hidden, near)
        )
        return {"full_attention": full, "sliding_attention": sliding} if self.masks_by_layer_type else sliding

    @exactly()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """Greedy tokens of Hugging Face `generate`, and the logits of each step, [count, vocabulary]."""
        if (known := self._generated.get((*prompt, count))) is not None:
            return known
        out = self.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found = out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
        self._generated[(*prompt, count)] = found
        return found


def require_same_tokens(got: Sequence[int], wanted: Sequence[int], logits: Tensor) -> None:
    """Equal up to the first step at which the tolerance allows another token.

    It may be the best one where its logit is as much above the oracle's as that of the oracle's token is below.
    """
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if mine != theirs:
            margin = float(logits[step, theirs] - logits[step, mine])
            assert margin <= 2 * TOLERANCE, f"token {step} is {mine}, not {theirs}, by a margin of {margin}"
            return
