"""What a step is made of, each part timed by itself: the floor that the engine is held against.

The sum is the model's other operations on the step's rows, plus, for every layer and segment, one folded attention
call. What merging, moving queries, scheduling and sampling take comes on top of it.
"""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor

from choreo_agents.attention.backends.partial import attend_run
from choreo_agents.attention.step import StepAttention
from choreo_agents.models import LoadedModel
from choreo_bench.experiments.bench_engine.scenarios import SpeedScenario
from choreo_bench.rivals.base import Timer


class _NoAttention:
    """Stands in for a step's attention and gives back the queries."""

    def attend(self, layer: int, query: Tensor, *_: object) -> Tensor:
        return query


class StepParts:
    """Timers of a step's parts."""

    def __init__(self, model: LoadedModel) -> None:
        self._adapter = model.adapter

    def without_attention(self, scenario: SpeedScenario) -> Timer:
        """The model's other operations on the scenario's rows, as transformers runs them."""
        rows = scenario.branches if scenario.is_decode else scenario.new
        wanted = range(rows) if scenario.is_decode else [rows - 1]
        attention = cast(StepAttention, _NoAttention())
        tokens, positions = [3 + row for row in range(rows)], list(range(rows))

        def timer() -> float:
            started = time.perf_counter()
            logits = self._adapter.logits(tokens, positions, attention, list(wanted))
            logits.argmax(-1).tolist()
            return time.perf_counter() - started

        return timer

    def at_matmul_rate(self, scenario: SpeedScenario) -> Timer:
        """What attention to the segments would take if its two products ran as fast as a large square one."""
        geometry = self._adapter.geometry
        pairs = sum(length * readers for length, readers in _work(scenario))
        wanted = 4 * pairs * self._adapter.heads * geometry.head_dim * geometry.layers
        side = 1024
        left, right = (torch.randn(side, side).to(geometry.dtype) for _ in range(2))

        def timer() -> float:
            started = time.perf_counter()
            for _ in range(4):
                torch.mm(left, right)
            return (time.perf_counter() - started) / 4 * wanted / (2 * side**3)

        return timer

    def attention(self, scenario: SpeedScenario) -> Timer:
        """One folded call for each segment of the scenario, in every layer."""
        geometry = self._adapter.geometry
        work = _work(scenario)
        group = self._adapter.heads // geometry.kv_heads
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(geometry.dtype)

        longest = sum(length for length, _ in work)
        keys = drawn(geometry.kv_heads, longest, geometry.head_dim)
        values = drawn(geometry.kv_heads, longest, geometry.head_dim)
        # As many layers' worth as the model has, so that caches help as little as they do in a step.
        pools = [(keys.clone(), values.clone()) for _ in range(geometry.layers)]
        blocks = [drawn(geometry.kv_heads, readers * group, geometry.head_dim) for _, readers in work]

        def timer() -> float:
            started = time.perf_counter()
            for pool_keys, pool_values in pools:
                first = 0
                for (length, _), block in zip(work, blocks, strict=True):
                    run = slice(first, first + length)
                    attend_run(block, pool_keys[:, run], pool_values[:, run], 0.125, causal=False)
                    first += length
            return time.perf_counter() - started

        return timer


def _work(scenario: SpeedScenario) -> list[tuple[int, int]]:
    """For each segment its tokens, and the queries that read it."""
    queries = scenario.branches if scenario.is_decode else scenario.new
    work: list[tuple[int, int]] = []
    for level in scenario.levels:
        readers = queries // len(level) if scenario.is_decode else queries
        work += [(length, readers) for length in level]
    return work
