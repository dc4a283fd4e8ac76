"""The slow stepwise oracle: one plain Hugging Face forward per message, its cache filled with key-rotated parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True)
class OracleMessage:
    """Keys and values of one message by the plain model, a layer each: [1, kv_heads, tokens, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    offset: int
    length: int
    logits: Tensor
    """[tokens, vocabulary]."""


class Oracle:
    def __init__(self, path: Path | str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        self.frequencies = self.model.model.rotary_emb.inv_freq.double()

    @torch.inference_mode()
    def encode(
        self, tokens: Sequence[int], parents: Sequence[OracleMessage], offsets: Sequence[int], new_offset: int
    ) -> OracleMessage:
        """Encode `tokens` at `new_offset`, seeing `parents` moved to `offsets`."""
        cache = DynamicCache(config=self.model.config)
        past = sum(parent.length for parent in parents)
        for layer in range(self.model.config.num_hidden_layers):
            if parents:
                keys = [self._moved(p.keys[layer], at - p.offset) for p, at in zip(parents, offsets, strict=True)]
                cache.update(torch.cat(keys, dim=2), torch.cat([p.values[layer] for p in parents], dim=2), layer)
        count = len(tokens)
        mask = torch.zeros(1, 1, count, past + count)
        mask[..., past:] = torch.full((count, count), float("-inf")).triu(1)
        logits = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(new_offset, new_offset + count)[None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        keys = tuple(layer.keys[:, :, past:].clone() for layer in cache.layers)
        values = tuple(layer.values[:, :, past:].clone() for layer in cache.layers)
        return OracleMessage(keys, values, new_offset, count, logits)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of Hugging Face `generate`, and each step's margin between its two best logits."""
        out = self.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        margins = [float(-step[0].topk(2).values.diff()) for step in out.logits]
        return out.sequences[0, len(prompt) :].tolist(), margins

    def _moved(self, keys: Tensor, shift: int) -> Tensor:
        """Rotate keys on by `shift` positions: pair dimension i with i + half, as Llama does."""
        angle = shift * self.frequencies
        cos, sin = torch.cat((angle.cos(),) * 2), torch.cat((angle.sin(),) * 2)
        half = keys.shape[-1] // 2
        turned = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1).double()
        return (keys.double() * cos + turned * sin).float()


def require_same_tokens(got: Sequence[int], wanted: Sequence[int], margins: Sequence[float]) -> None:
    """Equal up to the first step whose two best tokens the oracle itself can hardly tell apart."""
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if mine != theirs:
            assert margins[step] < 1e-4, f"token {step} is {mine}, not {theirs}, by a margin of {margins[step]}"
            return
