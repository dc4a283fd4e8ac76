"""transformers' continuous batching: paged memory, exact prefixes shared by whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from choreo_bench.competitors.base import Absent, Levels, Timer, after_prefixes, paths

_config: Any = getattr(transformers, "ContinuousBatchingConfig", None)
PAGE_TOKENS = 32
"""Of the usual 256, short messages would never share a page."""


class ContinuousBatching:
    """Continuous batching with one manager that stays open: its pages outlive a request."""

    name = "transformers, continuous batching"

    def __init__(self, path: Path, dtype: torch.dtype, kv_tokens: int) -> None:
        if _config is None:
            raise Absent("this version of transformers has no continuous batching")
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        page = "page_size" if hasattr(_config, "page_size") else "block_size"  # what transformers 5.17 calls it
        config = _config(**{page: PAGE_TOKENS}, num_blocks=kv_tokens // PAGE_TOKENS + 64, max_batch_tokens=4096)
        settings = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1)
        self._open = ExitStack()
        self._manager: Any = self._open.enter_context(
            self._model.continuous_batching_context_manager(
                generation_config=settings, continuous_batching_config=config
            )
        )

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        return after_prefixes(lambda prompt: self._generate([prompt], 1), messages, order, new)

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        prompts = [
            [token for level, index in path for token in levels[level][index]] + [3 + branch]
            for branch, path in enumerate(paths(levels, branches))
        ]
        self._generate(prompts, 1)

        def timer() -> float:
            times = self._generate(prompts, steps + 1)
            return (max(stamps[-1] for stamps in times) - max(stamps[0] for stamps in times)) / steps

        return timer

    def close(self) -> None:
        self._open.close()
        del self._manager, self._model

    def _generate(self, prompts: list[list[int]], count: int) -> list[list[float]]:
        """Return the time of each token of each answer, in seconds."""
        self._manager.add_requests(inputs=prompts, max_new_tokens=count, record_timestamps=True)
        done: list[Any] = []
        while len(done) < len(prompts):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done.append(result)
            elif result is None and not self._manager.is_running():
                raise Absent("it ended unexpectedly")
        if any(answer.error is not None or len(answer.generated_tokens) != count for answer in done):
            raise Absent("it generated another number of tokens")
        return [answer.timestamps for answer in done]
