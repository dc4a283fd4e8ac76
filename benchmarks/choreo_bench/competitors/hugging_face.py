"""Hugging Face transformers: forward and argmax in a loop, which is what `generate` does at its least."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from choreo_bench.competitors.base import Levels, Timer, paths

KeysValues = list[tuple[Tensor, Tensor]]
"""Of each layer: [batch, kv_heads, tokens, head_dim]."""


class HuggingFace:
    """A model with one of the two caches. Every row has its own copy of what it sees."""

    def __init__(self, path: Path, dtype: torch.dtype, cache: Literal["dynamic", "static"]) -> None:
        self.name = f"Hugging Face, {cache} cache"
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._static = cache == "static"

    @torch.inference_mode()
    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        known = [tokens for index in range(len(messages)) for tokens in messages[index]]
        prompt = [tokens for index in order for tokens in messages[index]]
        # A prefix cache finds what stands in the same place; of another order that is the messages before the first
        # that moved.
        common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=True)) if a != b), len(known))
        prefix = self._encoded(prompt[:common], None) if common else None
        rest = torch.tensor([[*prompt[common:], *new]])

        @torch.inference_mode()
        def timer() -> float:
            cache = self._cache(prefix, common + rest.shape[1])
            started = time.perf_counter()
            out = self._model(input_ids=rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            int(out.logits[0, -1].argmax())
            return time.perf_counter() - started

        return timer

    @torch.inference_mode()
    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        made: dict[tuple[tuple[int, int], ...], KeysValues] = {}
        rows: list[KeysValues] = []
        for path in paths(levels, branches):
            above: KeysValues | None = None
            for depth, (level, index) in enumerate(path):
                node = path[: depth + 1]
                if node not in made:
                    made[node] = self._encoded(levels[level][index], above)
                above = made[node]
            assert above is not None
            rows.append(above)
        batch = [
            (torch.cat([row[layer][0] for row in rows]), torch.cat([row[layer][1] for row in rows]))
            for layer in range(len(rows[0]))
        ]
        made.clear()
        rows.clear()
        length = batch[0][0].shape[2]

        @torch.inference_mode()
        def timer() -> float:
            cache = self._cache(batch, length + steps + 1)
            tokens = torch.arange(3, 3 + branches)[:, None]
            started = 0.0
            for step in range(steps + 1):
                if step == 1:
                    started = time.perf_counter()
                out = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            return (time.perf_counter() - started) / steps

        return timer

    def close(self) -> None:
        del self._model

    def _encoded(self, tokens: Sequence[int], above: KeysValues | None) -> KeysValues:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(above or []):
            cache.update(keys, values, layer)
        for first in range(0, len(tokens), 2048):
            chunk = torch.tensor([list(tokens[first : first + 2048])])
            self._model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _cache(self, known: KeysValues | None, longest: int) -> DynamicCache | StaticCache:
        cache = StaticCache(self._model.config, max_cache_len=longest) if self._static else DynamicCache()
        for layer, (keys, values) in enumerate(known or []):
            cache.update(keys, values, layer)
        return cache
