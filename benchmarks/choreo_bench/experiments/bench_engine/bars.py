"""What a run is held against, and what longer shared text costs."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_bench.experiments.bench_engine.measure import MATMUL_RATE, NO_ATTENTION, PARTS, SpeedReport
from choreo_bench.experiments.bench_engine.scenarios import SCENARIOS

REORDERED, _, LONE, EIGHT, MANY, SHORT, LONG, _ = (scenario.name for scenario in SCENARIOS)
OURS, SUM = "choreo", "the sum of parts"


@dataclass(frozen=True)
class SpeedBar:
    """A ratio of two times, and what it has to be."""

    what: str
    wanted: float
    at_least: bool
    found: float | None
    """None if either side was not measured."""

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted


@dataclass(frozen=True)
class Loss:
    """The share of its throughput that an engine loses when what its branches share grows."""

    rival: str
    share: float


def bars(report: SpeedReport) -> list[SpeedBar]:
    """Every bar, those that nothing was measured for included."""
    wanted = (
        (REORDERED, "HF dynamic", OURS, 60, True),
        (REORDERED, OURS, SUM, 0.9, False),
        (LONE, OURS, "HF dynamic", 1.05, False),
        (EIGHT, OURS, "HF static", 0.6, False),
        (EIGHT, OURS, "vLLM", 1.2, False),
        (EIGHT, OURS, "HF continuous", 1.0, False),
        (MANY, OURS, "vLLM", 1.2, False),
        (MANY, OURS, "HF continuous", 1.0, False),
        (LONG, OURS, SUM, 1.3, False),
    )
    return [
        SpeedBar(f"{scenario}: {above} / {_called(below)}", bound, at_least, _ratio(report, scenario, above, below))
        for scenario, above, below, bound, at_least in wanted
    ]


def _called(below: str) -> str:
    return "the sum" if below == SUM else below


def losses(report: SpeedReport) -> list[Loss]:
    """Throughput lost from 1k to 16k shared tokens; last the bound, at the rate of this machine's products."""
    found: list[Loss] = []
    for rival in report.results.get(LONG, {}):
        short, long = report.seconds(SHORT, rival), report.seconds(LONG, rival)
        if short and long and rival not in PARTS:
            found.append(Loss(rival, 1 - short / long))
    bound = [
        (report.seconds(name, NO_ATTENTION) or 0) + (report.seconds(name, MATMUL_RATE) or 0) for name in (SHORT, LONG)
    ]
    if all(bound) and found:
        found.append(Loss("no attention + attention at the matmul rate", 1 - bound[0] / bound[1]))
    return found


def _ratio(report: SpeedReport, scenario: str, above: str, below: str) -> float | None:
    times = [
        report.sum_of_parts(scenario) if name == SUM and scenario in report.results else report.seconds(scenario, name)
        for name in (above, below)
    ]
    return times[0] / times[1] if times[0] and times[1] else None
