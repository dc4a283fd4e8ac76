"""Figure 8: how each leak shifts Bob's cooperation."""

from __future__ import annotations

from pathlib import Path

from choreo_bench.experiments.eval_dilemma.measure import DilemmaReport
from choreo_bench.showing.plots import require_plots

_COLOURS = {"choreo": "#d1495b", "leak system": "#edae49", "leak plan": "#00798c", "reencoded": "#9aa0a6"}


def save_shifts(report: DilemmaReport, path: Path) -> None:
    """Draw the differences to the baseline, with their intervals, to a PNG file.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    alices = list(report.cooperated)
    width = 0.8 / len(_COLOURS)
    for place, (variant, colour) in enumerate(_COLOURS.items()):
        found = [report.difference(alice, variant) for alice in alices]
        shifts = [100 * each.share for each in found]
        intervals = [each.score_interval() for each in found]
        errors = [
            [max(0.0, shift - 100 * low) for shift, (low, _) in zip(shifts, intervals, strict=True)],
            [max(0.0, 100 * high - shift) for shift, (_, high) in zip(shifts, intervals, strict=True)],
        ]
        at = [index + (place - (len(_COLOURS) - 1) / 2) * width for index in range(len(alices))]
        axes.bar(at, shifts, width, yerr=errors, color=colour, label=variant, capsize=3)
    axes.axhline(0, color="#222222", linewidth=1)
    axes.set_xticks(range(len(alices)), [f"Alice: {alice}" for alice in alices])
    axes.set_ylabel("Bob cooperates: points above the baseline")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
