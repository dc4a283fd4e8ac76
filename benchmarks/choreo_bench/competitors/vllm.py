"""vLLM: paged memory, exact prefixes shared by whole blocks. Its engine runs in this process."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from choreo_bench.competitors.base import Absent, Levels, Timer, absent_on_failure, after_prefixes, paths

BLOCK_TOKENS = 128
"""Its default on a processor, faster than the smallest that works, 32. What fills no block is encoded anew."""
COPIES = 4
"""Timed runs with tokens of their own that its memory holds before it has to evict one."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm:
    """An engine that is stepped by hand."""

    name = "vLLM"

    def __init__(self, path: Path, dtype: torch.dtype, kv_tokens: int, rows: int, *, compiled: bool = True) -> None:
        if find_spec("vllm") is None:
            raise Absent("vllm is not installed")
        self._requests = 0
        self.said: list[list[int]] = []
        """The tokens of each answer of the last requests."""
        self._open = ExitStack()
        with absent_on_failure("vLLM"), _as_found(), ExitStack() as stack:
            stack.callback(_clean_up)
            vllm: Any = importlib.import_module("vllm")
            self._sampling: Any = vllm.SamplingParams
            self._engine: Any = vllm.LLM(
                str(path),
                dtype=str(dtype).removeprefix("torch."),
                skip_tokenizer_init=True,
                enforce_eager=not compiled,
                use_tqdm_on_load=False,
                enable_prefix_caching=True,
                block_size=BLOCK_TOKENS,
                max_model_len=kv_tokens,
                max_num_batched_tokens=4096,
                max_num_seqs=rows,
                kv_cache_memory_bytes=COPIES * kv_tokens * _bytes_per_token(path, dtype),
            ).llm_engine
            self._open = stack.pop_all()

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        return after_prefixes(lambda prompt: self._generate([prompt], 1), messages, order, new)

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        prompts = [
            [token for level, index in path for token in levels[level][index]] + [3 + branch]
            for branch, path in enumerate(paths(levels, branches))
        ]
        # The first finds the memory empty: were they all asked at once, each would encode what they share.
        for prompt in prompts:
            self._generate([prompt], 1)

        def timer() -> float:
            ends = self._generate(prompts, steps + 1)
            return (ends[-1] - ends[-1 - steps]) / steps

        return timer

    def close(self) -> None:
        with _as_found():
            self._engine.engine_core.shutdown()
            del self._engine
            self._open.close()

    def _generate(self, prompts: list[list[int]], count: int) -> list[float]:
        """Return when each step that gave every prompt a token ended, in seconds."""
        with absent_on_failure("vLLM"):
            for prompt in prompts:
                self._requests += 1
                sampling = self._sampling(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
                self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, sampling)
            ends: list[float] = []
            tokens_by_id: dict[str, list[int]] = {}
            while self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                if len(outputs) == len(prompts):
                    ends.append(time.perf_counter())
                tokens_by_id |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
            self.said = [tokens_by_id[request] for request in sorted(tokens_by_id, key=int)]
        if len(ends) < count or any(len(tokens) != count for tokens in self.said):
            raise Absent("vLLM generated another number of tokens")
        return ends


@contextmanager
def _as_found() -> Iterator[None]:
    """vLLM changes the environment, the number of threads and the function that sets it; here they are put back."""
    environment, threads, set_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(threads))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _clean_up() -> None:
    importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()


def _bytes_per_token(path: Path, dtype: torch.dtype) -> int:
    config: Any = AutoConfig.from_pretrained(path)
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim) * dtype.itemsize
