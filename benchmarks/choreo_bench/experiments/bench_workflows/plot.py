"""Figures 5 and 7: what trees of several sizes, and utterances of several lengths, gain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from choreo_bench.experiments.bench_workflows.report import Setting, WorkflowReport
from choreo_bench.showing.plots import require_plots

_FIGURES = (("ttft", "time to first token"), ("end_to_end_s", "end to end"))


def save_sweep(report: WorkflowReport, path: Path) -> None:
    """Draw the baseline's times over choreo's by branches, a line for each number of voters or critics.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    cells: dict[tuple[str, int], list[tuple[int, Setting]]] = {}
    for setting in report.settings_found():
        size = re.match(r"ToT (\d+)x(\d+)( critics)?", setting[0])
        if size is not None:
            cells.setdefault((size[3] or " voters", int(size[2])), []).append((int(size[1]), setting))
    lines = {f"{number}{who}": sorted(cells[who, number]) for who, number in sorted(cells)}
    _save(report, lines, "branches", path)


def save_lengths(report: WorkflowReport, path: Path) -> None:
    """Draw the baseline's times over choreo's by the length of an utterance, a line for each workflow.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    lines: dict[str, list[tuple[int, Setting]]] = {}
    for setting in report.settings_found():
        lines.setdefault(setting[0], []).append((int(setting[1].rpartition("/")[2]), setting))
    _save(report, {name: sorted(points) for name, points in lines.items()}, "tokens of each utterance", path)


def _save(report: WorkflowReport, lines: dict[str, list[tuple[int, Setting]]], axis: str, path: Path) -> None:
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"baseline / choreo, more is better: {report.title()}", fontsize=9)
    colours = ("#d1495b", "#30638e", "#edae49", "#4f7942", "#6b5876")
    for axes, (name, words) in zip(figure.subplots(1, 2), _FIGURES, strict=True):
        for colour, (label, points) in zip(colours * len(lines), lines.items(), strict=False):
            _line(axes, report, points, name, label, colour)
        axes.axhline(1.0, color="#222222", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = sorted({at for points in lines.values() for at, _ in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(axis)
        axes.set_title(words, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _line(
    axes: Any, report: WorkflowReport, points: list[tuple[int, Setting]], name: str, label: str, colour: str
) -> None:
    found = [(at, report.ratio(setting, "baseline", name)) for at, setting in points]
    known = [(at, ratio) for at, ratio in found if ratio is not None]
    axes.plot([at for at, _ in known], [ratio.ratio for _, ratio in known], marker="o", color=colour, label=label)
    spread = [(at, ratio.interval) for at, ratio in known if ratio.interval is not None]
    if spread:
        lows, highs = [low for _, (low, _) in spread], [high for _, (_, high) in spread]
        axes.fill_between([at for at, _ in spread], lows, highs, color=colour, alpha=0.15, linewidth=0)
