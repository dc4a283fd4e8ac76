"""A run as a picture: for each scenario one bar for each engine, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path

from choreo_bench.experiments.bench_engine.measure import ATTENTION, NO_ATTENTION, PARTS, SpeedReport
from choreo_bench.showing.plots import require_plots


def save_plot(report: SpeedReport, path: Path) -> None:
    """Draw a report to a PNG file.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    rivals = [name for name in next(iter(report.results.values())) if name not in PARTS]
    colours = dict(zip(rivals, ["#d1495b", *_greys(len(rivals) - 1)], strict=True))
    figure = Figure(figsize=(10, 2.1 * len(report.results) + 0.8), layout="constrained")
    figure.suptitle(f"{report.model}, {report.dtype}, {report.threads} threads: milliseconds, shorter is better")
    for axes, (scenario, found) in zip(
        figure.subplots(len(report.results), 1, squeeze=False)[:, 0], report.results.items(), strict=True
    ):
        measured = [(name, found[name]) for name in rivals if found[name].seconds]
        names = [name for name, _ in measured]
        middles = [1000 * each.middle for _, each in measured]
        errors = [
            [middle - 1000 * each.spread[0] for middle, (_, each) in zip(middles, measured, strict=True)],
            [1000 * each.spread[1] - middle for middle, (_, each) in zip(middles, measured, strict=True)],
        ]
        bars = axes.barh(names, middles, xerr=errors, color=[colours[name] for name in names], ecolor="#555555")
        axes.bar_label(bars, [f"{middle:,.1f}" for middle in middles], padding=6, fontsize=8)
        if found[NO_ATTENTION].seconds and found[ATTENTION].seconds:
            axes.axvline(1000 * report.sum_of_parts(scenario), color="#222222", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_title(f"{scenario} (dashed: the sum of its parts)", loc="left", fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _greys(count: int) -> list[str]:
    return [f"#{shade:02x}{shade:02x}{min(255, shade + 16):02x}" for shade in range(0x50, 0x50 + 16 * count, 16)][
        :count
    ]
