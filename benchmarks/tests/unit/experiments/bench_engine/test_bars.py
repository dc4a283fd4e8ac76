"""What a run is held against is worked out from its middle times, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from choreo_bench.experiments.bench_engine.measure import (
    ATTENTION,
    NO_ATTENTION,
    SCENARIOS,
    Measured,
    SpeedReport,
)
from choreo_bench.experiments.bench_engine.report import (
    EIGHT,
    LONE,
    MANY,
    REORDERED,
    bars,
    figure,
)


def measured(**seconds: float) -> dict[str, Measured]:
    return {name: Measured((each, each / 2, 2 * each)) for name, each in seconds.items()}


def report(**scenarios: dict[str, Measured]) -> SpeedReport:
    return SpeedReport("tiny", "float32", 1, 3, results=scenarios)


def parts(rest: float, calls: float) -> dict[str, float]:
    return {NO_ATTENTION: rest, ATTENTION: calls}


def test_bars_are_ratios_of_middles() -> None:
    run = report(
        **{
            REORDERED: measured(choreo=2, **{"HF dynamic": 140}, **parts(1, 0.5)),
            EIGHT: measured(choreo=3, **{"HF static": 4, "HF continuous": 3}, **parts(2, 1)),
        }
    )
    found = [bar for bar in bars(run) if bar.measured is not None]
    assert [(bar.what.partition(": ")[2], bar.measured and bar.measured.middle, bar.met) for bar in found] == [
        ("HF dynamic / choreo", 70, True),
        ("choreo / the sum", pytest.approx(2 / 1.5), False),
        ("choreo / HF static", 0.75, False),
        ("choreo / HF continuous", 1.0, True),
    ]
    assert len(bars(run)) == 8, "what was not measured is named, too"


def test_a_bar_that_is_just_reached_is_met() -> None:
    run = report(**{REORDERED: measured(choreo=9, **parts(6, 4))})
    assert [bar.met for bar in bars(run) if bar.measured is not None] == [True]


def test_scenarios_that_bars_name_are_measured() -> None:
    assert {REORDERED, LONE, EIGHT, MANY} <= {scenario.name for scenario in SCENARIOS}
    assert "1 branch " in LONE and "32 branches over 4k" in MANY
    assert "reordered" in REORDERED and "8 branches" in EIGHT


def test_a_run_is_drawn(tmp_path: Path) -> None:
    run = report(**{REORDERED: measured(choreo=2, **{"HF dynamic": 140}, **parts(1, 0.5))})
    run.results[REORDERED]["vLLM"] = Measured((), "vllm is not installed")
    figure(run).savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
