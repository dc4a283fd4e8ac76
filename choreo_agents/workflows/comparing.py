"""The same debate, word for word, under three methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from choreo_agents.engine.settings import MethodName
from choreo_agents.workflows.debating import DebateRun, DebateSetting, hold
from choreo_agents.workflows.running import RunCost

METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")


@dataclass(frozen=True)
class Ratios:
    """What a twin took in units of what choreo took."""

    tokens_encoded: float
    ttft_mean: float
    end_to_end: float


@dataclass(frozen=True)
class Comparison:
    """Costs by method, of the tokens that the baseline chose."""

    costs: dict[MethodName, RunCost]
    baseline: DebateRun
    """The baseline's own debate, decoded freely."""
    repeats: int

    def ratios(self, twin: MethodName) -> Ratios:
        """How much more than choreo a twin took."""
        other, own = self.costs[twin], self.costs["choreo"]
        return Ratios(
            other.tokens_encoded / own.tokens_encoded,
            other.ttft_mean_s / own.ttft_mean_s,
            other.end_to_end_s / own.end_to_end_s,
        )


def compare(setting: DebateSetting, *, repeats: int, on_progress: Callable[[], None] = lambda: None) -> Comparison:
    """Hold the baseline's debate, then force its tokens on every method, in turn, on fresh engines.

    Every decode step is still paid for, so the only difference is what each method encodes. Times are medians over
    the repeats; counts are the same in each.

    Args:
        setting: The debate.
        repeats: Timed runs of each method.
        on_progress: Called after every run; there are `runs(repeats)` of them.
    """
    baseline = hold(setting, "baseline")
    on_progress()
    held: dict[MethodName, list[RunCost]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method in METHODS:
            held[method].append(hold(setting, method, replay=baseline.said).cost)
            on_progress()
    return Comparison({method: _typical(costs) for method, costs in held.items()}, baseline, repeats)


def runs(repeats: int) -> int:
    """How many debates `compare` holds."""
    return 1 + repeats * len(METHODS)


def _typical(costs: list[RunCost]) -> RunCost:
    waits = (median(cost.ttft_mean_s for cost in costs),)
    return replace(costs[0], ttft_s=waits, end_to_end_s=median(cost.end_to_end_s for cost in costs))
