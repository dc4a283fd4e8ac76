"""Draws what more engines are worth: throughput, first tokens, and bytes between engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from choreo_agents.lab.showing.plots import require_plots
from choreo_agents.lab.simulating.outcome import SimulatedOutcome
from choreo_agents.lab.simulating.report import SimulationReport

_IDEAL, _THROUGHPUT, _WAITING, _BYTES = "#222222", "#30638e", "#d1495b", "#edae49"


def save_simulation(report: SimulationReport, path: Path) -> None:
    """Draw throughput over engines beside the ideal, and p95 of first tokens beside the bytes moved.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    outcomes = sorted(report.outcomes, key=lambda each: each.engines)
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(report.title(), fontsize=9)
    left, right = figure.subplots(1, 2)
    first = outcomes[0]
    ideal = [first.calls_per_s * each.engines / first.engines for each in outcomes]
    engines = [each.engines for each in outcomes]
    left.plot(engines, ideal, color=_IDEAL, linestyle="--", linewidth=1, label="ideal")
    _draw(left, outcomes, lambda each: each.calls_per_s, _THROUGHPUT, "simulated")
    left.set_yscale("log", base=2)
    top = max(each.calls_per_s for each in outcomes)
    left.set_ylim(first.calls_per_s / 1.5, min(ideal[-1], 8 * top) * 1.5)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:,.2g}")
    left.set_title("calls in a second", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    _draw(right, outcomes, lambda each: 1000 * (each.first_token(95) or 0.0), _WAITING, "first token, p95")
    right.set_ylim(bottom=0)
    right.set_title("first token, p95, ms (line); moved between engines, MB (bars)", loc="left", fontsize=10)
    bars = right.twinx()
    bars.bar(engines, [each.bytes_moved / 1e6 for each in outcomes], [0.4 * each for each in engines], color=_BYTES)
    bars.set_zorder(right.get_zorder() - 1)
    bars.spines[["top"]].set_visible(False)
    right.patch.set_visible(False)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(engines, [str(each) for each in engines])
        axes.minorticks_off()
        axes.set_xlabel("engines")
        axes.spines[["top", "right"] if axes is left else ["top"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw(
    axes: Any,
    outcomes: Sequence[SimulatedOutcome],
    figure_of: Callable[[SimulatedOutcome], float],
    colour: str,
    label: str,
) -> None:
    engines = [each.engines for each in outcomes]
    axes.plot(engines, [figure_of(each) for each in outcomes], marker="o", color=colour, label=label)
