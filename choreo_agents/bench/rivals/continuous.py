"""transformers' continuous batching: paged memory, exact prefixes shared by whole pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from choreo_agents.bench.rivals.base import Absent, Levels, Timer, paths

_config: Any = getattr(transformers, "ContinuousBatchingConfig", None)
PAGE_TOKENS = 32
"""Of the usual 256, short messages would never share a page."""


class ContinuousBatching:
    """`generate_batch` over a manager that keeps its pages between calls."""

    name = "transformers, continuous batching"

    def __init__(self, path: Path, dtype: torch.dtype, kv_tokens: int) -> None:
        if _config is None:
            raise Absent("this transformers has no continuous batching")
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._config = _config(page_size=PAGE_TOKENS, num_blocks=kv_tokens // PAGE_TOKENS + 64, max_batch_tokens=4096)

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        self._generate([[token for tokens in messages for token in tokens]], 1)
        asked = [token for index in order for token in messages[index]]
        calls = 0

        def timer() -> float:
            nonlocal calls
            calls += 1
            # What was asked before is in its pages: every call's new tokens are others.
            return self._generate([[*asked, *(3 + (token + calls) % 300 for token in new)]], 1)

        return timer

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        prompts = [
            [token for level, index in path for token in levels[level][index]] + [3 + branch]
            for branch, path in enumerate(paths(levels, branches))
        ]

        def timer() -> float:
            self._generate(prompts, 1)
            return (self._generate(prompts, steps + 1) - self._generate(prompts, 1)) / steps

        return timer

    def close(self) -> None:
        del self._model

    def _generate(self, prompts: list[list[int]], count: int) -> float:
        settings = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1)
        started = time.perf_counter()
        done = self._model.generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=self._config,
            progress_bar=False,
            persistent_manager=True,
        )
        took = time.perf_counter() - started
        if len(done) != len(prompts) or any(len(each.generated_tokens) != count for each in done.values()):
            raise Absent("it did not generate what was asked for")
        return took
