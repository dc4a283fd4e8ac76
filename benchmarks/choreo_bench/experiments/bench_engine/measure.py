"""Runs every scenario on every rival, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from choreo_agents.models import load_model
from choreo_bench.experiments.bench_engine.parts import StepParts
from choreo_bench.experiments.bench_engine.scenarios import SpeedScenario
from choreo_bench.rivals import (
    Absent,
    ContinuousBatching,
    HuggingFace,
    LlamaCpp,
    Ours,
    Rival,
    Timer,
    Vllm,
)

MOST_COPIED_BYTES = 6 << 30
"""A rival that copies what is shared for every row is left out beyond."""
REST_S = 0.3
"""Between two runs: the threads of the one before may spin for a while."""
NO_ATTENTION, ATTENTION = "no attention", "attention calls alone"
MATMUL_RATE = "attention at the matmul rate"
PARTS = (NO_ATTENTION, ATTENTION, MATMUL_RATE)
"""Rows that are no engine."""


@dataclass(frozen=True)
class Measured:
    """Seconds of one scenario on one rival."""

    seconds: tuple[float, ...]
    absent: str = ""
    """Why there are none."""

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.seconds), max(self.seconds)


@dataclass
class SpeedReport:
    """A whole run."""

    model: str
    dtype: str
    threads: int
    torch_version: str
    repeats: int
    transformers_version: str = field(default_factory=lambda: version("transformers"))
    results: dict[str, dict[str, Measured]] = field(default_factory=dict)
    """By scenario, then by rival."""

    def as_object(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return asdict(self)

    def seconds(self, scenario: str, rival: str) -> float | None:
        """The middle of what was measured; None if it was not."""
        found = self.results.get(scenario, {}).get(rival)
        return found.middle if found is not None and found.seconds else None

    def sum_of_parts(self, scenario: str) -> float:
        """Seconds of the model's other operations and of the attention calls, each alone."""
        found = self.results[scenario]
        return found[NO_ATTENTION].middle + found[ATTENTION].middle


def measure_all(
    path: Path,
    dtype: torch.dtype,
    scenarios: Sequence[SpeedScenario],
    *,
    repeats: int,
    on_progress: Callable[[str, str], None] = lambda scenario, rival: None,
    on_scenario: Callable[[SpeedReport, SpeedScenario], None] = lambda report, scenario: None,
) -> SpeedReport:
    """Time every scenario on every rival that can do it.

    Args:
        path: A checkpoint's folder; every rival loads the same weights.
        dtype: Of weights and KV.
        scenarios: What to time.
        repeats: Timed runs of each, after one that is not counted; the rivals take turns.
        on_progress: Told before each rival is made ready for a scenario.
        on_scenario: Told what was found so far, after each.
    """
    report = SpeedReport(
        path.name, str(dtype).removeprefix("torch."), torch.get_num_threads(), torch.__version__, repeats
    )
    for scenario in scenarios:
        timers: dict[str, Timer] = {}
        absent: dict[str, str] = {}
        rivals: list[Rival] = []
        makers = _makers(path, dtype, scenario)
        for name, make in makers.items():
            on_progress(scenario.name, name)
            try:
                timers[name] = make(rivals)
            except Absent as reason:
                absent[name] = str(reason)
        report.results[scenario.name] = _interleaved(timers, absent, repeats, list(makers))
        for rival in rivals:
            rival.close()
        on_scenario(report, scenario)
    return report


def _interleaved(
    timers: Mapping[str, Timer], absent: Mapping[str, str], repeats: int, order: Sequence[str]
) -> dict[str, Measured]:
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for round_ in range(repeats + 1):
        for name in list(taken):
            time.sleep(REST_S)
            try:
                seconds = timers[name]()
            except Absent as reason:
                # What it cannot do after all keeps nobody else from being timed.
                absent = {**absent, name: str(reason)}
                del taken[name]
                continue
            if round_:
                taken[name].append(seconds)
    found = {name: Measured(tuple(seconds)) for name, seconds in taken.items()}
    found |= {name: Measured((), reason) for name, reason in absent.items()}
    return {name: found[name] for name in order}


def _makers(path: Path, dtype: torch.dtype, scenario: SpeedScenario) -> dict[str, Callable[[list[Rival]], Timer]]:
    model = load_model(path, dtype=dtype)
    parts = StepParts(model)
    copied = scenario.copied_tokens() * model.adapter.geometry.bytes_per_token
    levels = scenario.drawn()
    new = [3 + number % 250 for number in range(scenario.new)]

    def timer(rivals: list[Rival], rival: Rival) -> Timer:
        rivals.append(rival)
        if scenario.is_decode:
            return rival.decode(levels, scenario.branches, scenario.steps)
        return rival.first_token(levels[0], scenario.order, new)

    def copying(rivals: list[Rival], make: Callable[[], Rival]) -> Timer:
        if copied > MOST_COPIED_BYTES:
            raise Absent(f"its copies of the shared part would take {copied / 1e9:.0f} GB")
        return timer(rivals, make())

    room, rows = scenario.tokens(), max(1, scenario.branches)
    plain = load_model(path, dtype=dtype, prepacked=False) if model.prepacked else None

    def unpacked(rivals: list[Rival]) -> Timer:
        if plain is None:
            raise Absent("no weights are laid out beforehand here")
        return timer(rivals, Ours(plain, scenario.tokens()))

    return {
        "choreo": lambda rivals: timer(rivals, Ours(model, scenario.tokens())),
        "choreo, plain weights": unpacked,
        "HF dynamic": lambda rivals: copying(rivals, lambda: HuggingFace(path, dtype, "dynamic")),
        "HF static": lambda rivals: copying(rivals, lambda: HuggingFace(path, dtype, "static")),
        "HF continuous": lambda rivals: timer(rivals, ContinuousBatching(path, dtype, 4 * scenario.tokens() + 8192)),
        "vLLM": lambda rivals: timer(rivals, Vllm(path, dtype, room, rows)),
        "llama.cpp prefix": lambda rivals: timer(rivals, LlamaCpp(path, dtype, "prefix", room)),
        "llama.cpp choreography": lambda rivals: timer(rivals, LlamaCpp(path, dtype, "choreography", room)),
        NO_ATTENTION: lambda rivals: parts.without_attention(scenario),
        ATTENTION: lambda rivals: parts.attention(scenario),
        MATMUL_RATE: lambda rivals: parts.at_matmul_rate(scenario),
    }
