"""Report of a run of all engines: bars, tables and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from choreo_bench.experiments.bench_engine.measure import (
    ATTENTION,
    NO_ATTENTION,
    PARTS,
    SCENARIOS,
    SpeedReport,
    SpeedScenario,
)
from choreo_bench.harness import Report, Table
from choreo_bench.timing import Bar, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REORDERED, _, LONE, EIGHT, MANY, _, _ = (scenario.name for scenario in SCENARIOS)
OURS, SUM = "choreo", "the sum"
COLUMNS = ("", "ms", "spread", "time / choreo's", "time / sum")


def bars(report: SpeedReport) -> list[Bar]:
    """Compute every bar, those that nothing was measured for included."""
    wanted = (
        (REORDERED, "HF dynamic", OURS, 60, True),
        (REORDERED, OURS, SUM, 0.9, False),
        (LONE, OURS, "HF dynamic", 1.05, False),
        (EIGHT, OURS, "HF static", 0.6, False),
        (EIGHT, OURS, "vLLM", 1.0, False),
        (EIGHT, OURS, "HF continuous", 1.0, False),
        (MANY, OURS, "vLLM", 1.0, False),
        (MANY, OURS, "HF continuous", 1.0, False),
    )
    return [
        Bar(f"{scenario}: {above} / {below}", bound, _ratio(report, scenario, above, below), at_least)
        for scenario, above, below, bound, at_least in wanted
    ]


def _ratio(report: SpeedReport, scenario: str, above: str, below: str) -> Spread | None:
    times = [
        report.sum_of_parts(scenario) if name == SUM and scenario in report.results else report.seconds(scenario, name)
        for name in (above, below)
    ]
    return Spread.of([times[0] / times[1]]) if times[0] and times[1] else None


def as_report(report: SpeedReport, scenarios: Sequence[SpeedScenario], *, whole: bool) -> Report:
    """Report what was run so far.

    Args:
        report: What was found.
        scenarios: In this order.
        whole: Whether messages are as long as the bars are meant for.
    """
    lines = [str(bar) for bar in bars(report)] if whole else []
    return Report(
        [_table(report, scenario) for scenario in scenarios if scenario.name in report.results],
        asdict(report),
        f"{report.model}, {report.dtype}, {report.threads} threads. {report.made_by}. Medians of {report.repeats} runs "
        "that take turns.",
        lines,
    )


def _table(report: SpeedReport, scenario: SpeedScenario) -> Table:
    """Competitor, milliseconds, spread, against choreo, against the sum of parts."""
    results = report.results[scenario.name]
    ours, floor = results["choreo"].spread.middle, report.sum_of_parts(scenario.name)
    rows: list[tuple[str, ...]] = []
    for name, measured in results.items():
        if measured.absent:
            rows.append((name, "-", measured.absent, "", ""))
            continue
        middle, least, most = measured.spread.middle, measured.spread.least, measured.spread.most
        against = "" if name in ("choreo", *PARTS) else f"{middle / ours:.2f}x"
        rows.append((name, _ms(middle), f"{_ms(least)} to {_ms(most)}", against, f"{middle / floor:.2f}x"))
    rows.append(("the sum: no attention + calls alone", _ms(floor), "", "", "1.00x"))
    what = "a decode step" if scenario.is_decode else "to the first token"
    return Table(COLUMNS, rows, f"{scenario.name}: ms {what}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def figure(report: SpeedReport) -> Figure:
    """Draw for each scenario one bar for each engine, on a logarithmic scale."""
    competitors = [name for name in next(iter(report.results.values())) if name not in PARTS]
    greys = [str(0.3 + 0.5 * place / len(competitors)) for place in range(len(competitors))]
    colours = {name: "#d1495b" if name == OURS else grey for name, grey in zip(competitors, greys, strict=True)}
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

    drawn = Figure(figsize=(10, 2.1 * len(report.results) + 0.8), layout="constrained")
    drawn.suptitle(f"{report.model}, {report.dtype}, {report.threads} threads: milliseconds, shorter is better")
    panels = drawn.subplots(len(report.results), 1, squeeze=False)[:, 0]
    for axes, (scenario, results) in zip(panels, report.results.items(), strict=True):
        times = {name: results[name].spread for name in competitors if results[name].seconds}
        middles = [1000 * spread.middle for spread in times.values()]
        errors = [
            [1000 * (spread.middle - spread.least) for spread in times.values()],
            [1000 * (spread.most - spread.middle) for spread in times.values()],
        ]
        barred = axes.barh(list(times), middles, xerr=errors, color=[colours[name] for name in times], ecolor="#555555")
        axes.bar_label(barred, [f"{middle:,.1f}" for middle in middles], padding=6, fontsize=8)
        if results[NO_ATTENTION].seconds and results[ATTENTION].seconds:
            axes.axvline(1000 * report.sum_of_parts(scenario), color="#222222", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_title(f"{scenario} (dashed: the sum of its parts)", loc="left", fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(labelsize=8)
    return drawn
