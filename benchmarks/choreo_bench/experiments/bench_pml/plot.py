"""First tokens by cached tokens, drawn: encoding grows with the square, reading what is encoded with the length."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from choreo_bench.experiments.bench_pml.measure import PLACES, WHOLE, Way
from choreo_bench.experiments.bench_pml.report import ModuleReport
from choreo_bench.showing.plots import require_plots


def save_plot(report: ModuleReport, path: Path) -> None:
    """Draw seconds by cached tokens to a PNG file, with the polynomial that fits best (Prompt Cache, figure 5).

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(f"seconds to the first token: {report.title()}", fontsize=9)
    panels: list[tuple[tuple[Way, ...], int, str]] = [
        (WHOLE, 2, "everything encoded; dashed: the best parabola"),
        (PLACES, 1, "modules cached; dashed: the best straight line"),
    ]
    for axes, (ways, degree, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for way in ways:
            points = {
                length: median(found)
                for length, case in report.lengths().items()
                if (found := report.seconds(case, way))
            }
            if points:
                [line] = axes.plot(list(points), list(points.values()), marker="o", linestyle="none", label=way)
            if len(points) > degree:
                at = np.linspace(0, max(points), 100)
                fit = np.polyfit(list(points), list(points.values()), degree)
                axes.plot(at, np.polyval(fit, at), linestyle="--", linewidth=1, color=line.get_color())
        axes.set_xlabel("cached tokens")
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
