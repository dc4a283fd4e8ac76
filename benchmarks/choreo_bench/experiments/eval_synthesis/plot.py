"""How answers fare with more and longer branches, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from choreo_bench.experiments.eval_synthesis.report import Scores
from choreo_bench.experiments.eval_synthesis.sweeps import SWEPT

_LABELS = {"branches": "branches (trained on up to 8)", "length": "things said in each branch"}
_COLOURS = {contender.name: f"C{number}" for number, contender in enumerate(SWEPT)}


def save_sweeps(scores: Scores, names: Mapping[str, Mapping[int | str, Sequence[str]]], path: Path) -> None:
    """Draw the mean share of solved problems by number and by length of branches into a PNG file."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    drawn = [key for key in _LABELS if key in names]
    figure = Figure(figsize=(4.4 * len(drawn), 3.4), layout="constrained")
    axes = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for axis, key in zip(axes, drawn, strict=True):
        for contender in SWEPT:
            values = [
                value for value, tasks in names[key].items() if any((contender.name, task) in scores for task in tasks)
            ]
            shares = [
                100
                * mean(
                    mean(scores[contender.name, task]) for task in names[key][value] if (contender.name, task) in scores
                )
                for value in values
            ]
            places = [list(names[key]).index(value) for value in values]
            if values:
                axis.plot(places, shares, marker="o", color=_COLOURS[contender.name], label=contender.name)
        axis.set_xticks(range(len(names[key])), [str(value) for value in names[key]])
        axis.set_xlabel(_LABELS[key])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("solved, % (mean of tasks)")
    axes[0].legend()
    figure.savefig(path, dpi=150)
