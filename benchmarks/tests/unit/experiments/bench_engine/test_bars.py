"""What a run is held against is worked out from its middle times, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from choreo_bench.experiments.bench_engine.measure import (
    ATTENTION,
    MATMUL_RATE,
    NO_ATTENTION,
    SCENARIOS,
    Measured,
    SpeedReport,
)
from choreo_bench.experiments.bench_engine.report import (
    EIGHT,
    LONE,
    LONG,
    MANY,
    REORDERED,
    SHORT,
    bars,
    figure,
    losses,
)


def measured(**seconds: float) -> dict[str, Measured]:
    return {name: Measured((each, each / 2, 2 * each)) for name, each in seconds.items()}


def report(**scenarios: dict[str, Measured]) -> SpeedReport:
    return SpeedReport("tiny", "float32", 1, "2.13", 3, results=scenarios)


def parts(rest: float, calls: float, bound: float) -> dict[str, float]:
    return {NO_ATTENTION: rest, ATTENTION: calls, MATMUL_RATE: bound}


def test_bars_are_ratios_of_middles() -> None:
    run = report(
        **{
            REORDERED: measured(choreo=2, **{"HF dynamic": 140}, **parts(1, 0.5, 0.2)),
            EIGHT: measured(choreo=3, **{"HF static": 4, "HF continuous": 3}, **parts(2, 1, 0.5)),
        }
    )
    found = [bar for bar in bars(run) if bar.found is not None]
    assert [(bar.what.partition(": ")[2], bar.found and bar.found.middle, bar.met) for bar in found] == [
        ("HF dynamic / choreo", 70, True),
        ("choreo / the sum", pytest.approx(2 / 1.5), False),
        ("choreo / HF static", 0.75, False),
        ("choreo / HF continuous", 1.0, True),
    ]
    assert len(bars(run)) == 9, "what was not measured is named, too"


def test_a_bar_that_is_just_reached_is_met() -> None:
    run = report(**{LONG: measured(choreo=13, **parts(6, 4, 2))})
    assert [bar.met for bar in bars(run)][-1] is True


def test_lost_throughput_is_that_of_engines_and_of_the_bound() -> None:
    both = {SHORT: measured(choreo=1, vLLM=2, **parts(1, 9, 0)), LONG: measured(choreo=4, vLLM=5, **parts(1, 9, 1))}
    both[LONG]["HF dynamic"] = Measured((), "not here")
    both[SHORT][MATMUL_RATE] = Measured((1e-9,))
    found = losses(report(**both))
    assert list(found) == ["choreo", "vLLM", "no attention + attention at the matmul rate"]
    assert list(found.values()) == [0.75, pytest.approx(0.6), pytest.approx(0.5)]
    assert losses(report(**{LONG: both[LONG]})) == {}


def test_scenarios_that_bars_name_are_measured() -> None:
    assert {REORDERED, LONE, EIGHT, MANY, SHORT, LONG} <= {scenario.name for scenario in SCENARIOS}
    assert "1 branch " in LONE and "32 branches over 4k" in MANY
    assert "reordered" in REORDERED and "8 branches" in EIGHT and "over 1k" in SHORT and "over 16k" in LONG


def test_a_run_is_drawn(tmp_path: Path) -> None:
    run = report(**{REORDERED: measured(choreo=2, **{"HF dynamic": 140}, **parts(1, 0.5, 0.2))})
    run.results[REORDERED]["vLLM"] = Measured((), "vllm is not installed")
    figure(run).savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
