"""llama.cpp by its C interface: one sequence whose exact prefix is kept, or messages moved to where they are wanted."""

from __future__ import annotations

import ctypes
import importlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from choreo_bench.competitors.base import Absent, Levels, Timer, absent_on_failure, paths
from choreo_bench.competitors.llama_gguf import write_gguf

SEQUENCES = 128
"""Sequences at once."""
BATCH_TOKENS = 2048
"""Tokens of one call, llama.cpp's own default."""


class LlamaCpp:
    """A context with unified memory. Its KV is f16, its default, where the weights are bf16."""

    def __init__(self, path: Path, dtype: torch.dtype, mode: Literal["prefix", "choreography"], kv_tokens: int) -> None:
        for module, package in (("llama_cpp", "llama-cpp-python"), ("gguf", "gguf")):
            if find_spec(module) is None:
                raise Absent(f"{package} is not installed")
        self.name = f"llama.cpp, {mode}"
        self._moves = mode == "choreography"
        self._open = ExitStack()
        self.said: list[int] = []
        """The tokens of the last timed run, step by step."""
        with absent_on_failure("llama.cpp"), ExitStack() as stack:
            self._llama: Any = importlib.import_module("llama_cpp")
            self._load(path, dtype, stack)
            self._settings = self._set(dtype, kv_tokens)
            self._open = stack.pop_all()

    def _load(self, path: Path, dtype: torch.dtype, stack: ExitStack) -> None:
        llama = self._llama
        # Kept for as long as it may be called.
        self._quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._quiet, None)
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
        write_gguf(path, dtype, file)
        self._model = llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
        if not self._model:
            raise Absent("llama.cpp cannot load these weights")
        stack.callback(llama.llama_model_free, self._model)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def _set(self, dtype: torch.dtype, kv_tokens: int) -> Any:
        llama = self._llama
        settings = llama.llama_context_default_params()
        settings.n_ctx = -(-kv_tokens // 256) * 256
        settings.n_batch = BATCH_TOKENS
        settings.n_seq_max = SEQUENCES
        settings.kv_unified = True
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        if dtype == torch.float32:
            settings.type_k = settings.type_v = llama.GGML_TYPE_F32
        return settings

    def _begin(self, flash: bool) -> None:
        """Make the memory. Its flash attention is the faster of two where much is encoded, the slower on few rows."""
        llama = self._llama
        self._settings.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = llama.llama_init_from_model(self._model, self._settings)
        if not self._context:
            raise Absent("llama.cpp cannot create a context of this size")
        self._open.callback(llama.llama_free, self._context)
        self._memory = llama.llama_get_memory(self._context)

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        return self._moved(messages, order, new) if self._moves else self._after_prefix(messages, order, new)

    def _after_prefix(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        """The cache keeps the tokens that both prompts begin with; what follows them is encoded anew."""
        known = [token for tokens in messages for token in tokens]
        prompt = [token for index in order for token in messages[index]]
        common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=True)) if a != b), len(known))
        rest = [*prompt[common:], *new]
        with absent_on_failure("llama.cpp"):
            self._begin(flash=len(rest) > common)
            self._encode(0, prompt[:common], 0)

        def timer() -> float:
            with absent_on_failure("llama.cpp"):
                started = time.perf_counter()
                self._encode(0, rest, common)
                self.said = self._greedy(1)
                took = time.perf_counter() - started
                self._forget(0, common)
            return took

        return timer

    def _moved(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        """Each message is encoded alone, where the first order has it, as a sequence of its own; 0 gets them all."""
        llama = self._llama
        lengths = [len(tokens) for tokens in messages]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        moves: dict[int, int] = {}
        end = 0
        for index in order:
            moves[index] = end - starts[index]
            end += lengths[index]

        def move(sign: int) -> None:
            for index, distance in moves.items():
                if distance:
                    llama.llama_memory_seq_add(self._memory, index + 1, -1, -1, sign * distance)

        with absent_on_failure("llama.cpp"):
            self._begin(flash=False)
            for index, tokens in enumerate(messages):
                self._encode(index + 1, tokens, starts[index])

        def timer() -> float:
            with absent_on_failure("llama.cpp"):
                started = time.perf_counter()
                move(1)
                for index in order:
                    llama.llama_memory_seq_cp(self._memory, index + 1, 0, -1, -1)
                self._encode(0, new, end)
                self.said = self._greedy(1)
                took = time.perf_counter() - started
                self._forget(0)
                # Keys are rotated when the next call comes: one of a single token, so that the clock sees one move.
                move(-1)
                self._encode(0, new[:1], 0)
                self._forget(0)
            return took

        return timer

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        if self._moves:
            raise Absent("nothing is moved: see llama.cpp prefix")
        if branches > SEQUENCES:
            raise Absent(f"it is given {SEQUENCES} sequences")
        with absent_on_failure("llama.cpp"):
            self._begin(flash=False)
            starts = self._tree(levels, branches)

        def timer() -> float:
            with absent_on_failure("llama.cpp"):
                tokens = list(range(3, 3 + branches))
                self.said = []
                started = 0.0
                for step in range(steps + 1):
                    if step == 1:
                        started = time.perf_counter()
                    positions = [start + step for start in starts]
                    self._call(tokens, positions, list(range(branches)), branches)
                    tokens = self._greedy(branches)
                    self.said += tokens
                took = (time.perf_counter() - started) / steps
                for branch, start in enumerate(starts):
                    self._forget(branch, start)
            return took

        return timer

    def close(self) -> None:
        self._open.close()

    def _tree(self, levels: Levels, branches: int) -> list[int]:
        """Encode each node once, for the first branch below it; the others share its cells. Each branch's length."""
        owner: dict[tuple[tuple[int, int], ...], int] = {(): 0}
        starts: list[int] = []
        for branch, path in enumerate(paths(levels, branches)):
            length = 0
            for depth, (level, index) in enumerate(path):
                node = path[: depth + 1]
                tokens = levels[level][index]
                if node not in owner:
                    self._share(owner[path[:depth]], branch, length)
                    self._encode(branch, tokens, length)
                    owner[node] = branch
                length += len(tokens)
            self._share(owner[path], branch, length)
            starts.append(length)
        return starts

    def _share(self, source: int, target: int, length: int) -> None:
        if source != target and length:
            # What the target has of these already stays.
            self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def _forget(self, sequence: int, start: int = -1) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def _encode(self, sequence: int, tokens: Sequence[int], start: int) -> None:
        """Tokens of one sequence; the last one's logits are kept."""
        for first in range(0, len(tokens), BATCH_TOKENS):
            chunk = list(tokens[first : first + BATCH_TOKENS])
            positions = list(range(start + first, start + first + len(chunk)))
            self._call(chunk, positions, [sequence] * len(chunk), 1)

    def _call(self, tokens: list[int], positions: list[int], sequences: list[int], wanted: int) -> None:
        """Run one batch; the last `wanted` tokens give logits."""
        count = len(tokens)
        numbers = ctypes.c_int32 * count
        ids = numbers(*sequences)
        pointers = (ctypes.POINTER(ctypes.c_int32) * count)()
        first, width = ctypes.addressof(ids), ctypes.sizeof(ctypes.c_int32)
        for row in range(count):
            pointers[row] = ctypes.cast(first + row * width, ctypes.POINTER(ctypes.c_int32))
        batch = self._llama.llama_batch(
            n_tokens=count,
            token=numbers(*tokens),
            pos=numbers(*positions),
            n_seq_id=numbers(*[1] * count),
            seq_id=pointers,
            logits=(ctypes.c_int8 * count)(*[0] * (count - wanted), *[1] * wanted),
        )
        code = self._llama.llama_decode(self._context, batch)
        if code:
            raise Absent(f"llama.cpp rejected a batch with code {code}")

    def _greedy(self, rows: int) -> list[int]:
        logits = np.ctypeslib.as_array(self._llama.llama_get_logits(self._context), (rows, self._vocabulary))
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens
