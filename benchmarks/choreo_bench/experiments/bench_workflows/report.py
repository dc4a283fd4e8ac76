"""A table and figures from a journal of workflow runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from choreo_agents.training.journal import Record
from choreo_bench.evaluation.intervals import Interval, median_interval
from choreo_bench.experiments.bench_workflows.measure import METHODS
from choreo_bench.harness import Report, Table
from choreo_bench.timing import title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "workflow",
    "method",
    "problems",
    "first token, ms",
    "end to end, s",
    "tokens encoded",
    "tokens reused",
    "rows a decode step",
    "first token / choreo's",
    "end to end / choreo's",
)
FIGURES = {"ttft": "time to first token", "end_to_end_s": "end to end"}
_COLOURS = ("#d1495b", "#30638e", "#edae49", "#4f7942", "#6b5876")
Setting = tuple[str, str]
"""A scenario, and its lengths as `64/128/256`."""


@dataclass(frozen=True)
class Ratio:
    """A method's time over choreo's: the median over the problems that both ran."""

    ratio: float
    interval: Interval | None
    """95 %, bootstrap over problems."""

    def words(self) -> str:
        if self.interval is None:
            return f"{self.ratio:.2f}x"
        return f"{self.ratio:.2f}x ({self.interval[0]:.2f} to {self.interval[1]:.2f})"


class WorkflowReport:
    """Runs of one model.

    Args:
        settings: Model, dtype, threads, device, versions.
        records: As in a journal.
    """

    def __init__(self, settings: Mapping[str, Any], records: Sequence[Record]) -> None:
        self.settings = settings
        self.records = records
        self._runs: dict[Setting, dict[str, dict[int, Record]]] = {}
        for record in records:
            lengths = "/".join(str(record["lengths"][name]) for name in ("system", "problem", "utterance"))
            methods = self._runs.setdefault((record["scenario"], lengths), {})
            methods.setdefault(record["method"], {})[record["problem"]] = record

    def methods(self, setting: Setting) -> list[str]:
        """Ours first, in their order."""
        known: list[str] = list(METHODS)
        return sorted(self._runs[setting], key=lambda method: known.index(method) if method in known else 9)

    def ratio(self, setting: Setting, method: str, figure: str) -> Ratio | None:
        """`figure` is one of `FIGURES`; None if no problem was run by both."""
        runs = self._runs.get(setting, {})
        both = sorted(set(runs.get(method, {})) & set(runs.get("choreo", {})))
        if not both:
            return None
        ratios = [_figure(runs[method][problem], figure) / _figure(runs["choreo"][problem], figure) for problem in both]
        return Ratio(median(ratios), median_interval(ratios))

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        return [self._row(setting, method) for setting in self._runs for method in self.methods(setting)]

    def _row(self, setting: Setting, method: str) -> tuple[str, ...]:
        runs = list(self._runs[setting][method].values())

        def middle(figure: str) -> float:
            return median(_figure(run, figure) for run in runs)

        ratios = [self.ratio(setting, method, figure) for figure in FIGURES]
        against = ["" if ratio is None or method == "choreo" else ratio.words() for ratio in ratios]
        counts = [f"{middle(name):,.0f}" if name in runs[0] else "" for name in ("tokens_encoded", "tokens_reused")]
        rows = f"{middle('rows_per_decode_step'):.1f}" if "rows_per_decode_step" in runs[0] else "1.0"
        times = [f"{1000 * middle('ttft'):,.0f}", f"{middle('end_to_end_s'):,.2f}"]
        name = f"{setting[0]}, {setting[1]}"
        return (name, method, str(len(runs)), *times, *counts, rows, *against)

    def report(self) -> Report:
        """Report all of it; raw runs and ratios as plain JSON."""
        ratios = [
            {"scenario": setting[0], "lengths": setting[1], "method": method, "figure": figure}
            | {"ratio": ratio.ratio, "interval": ratio.interval}
            for setting in self._runs
            for method in self.methods(setting)
            for figure in FIGURES
            if method != "choreo" and (ratio := self.ratio(setting, method, figure)) is not None
        ]
        title = f"{title_of(self.settings)}; lengths: system/problem/utterance"
        return Report(
            [Table(COLUMNS, self.rows(), title, words=2, left_out=("tokens reused",))],
            {"settings": dict(self.settings), "ratios": ratios, "runs": list(self.records)},
            f"{title} in tokens. {self.settings['made_by']}.",
        )

    def sweep_figure(self) -> Figure:
        """Draw the baseline's times over choreo's by branches, a line for each number of voters (figure 5)."""
        cells: dict[tuple[str, int], list[tuple[int, Setting]]] = {}
        for setting in self._runs:
            size = re.match(r"ToT (\d+)x(\d+)( critics)?", setting[0])
            if size is not None:
                cells.setdefault((size[3] or " voters", int(size[2])), []).append((int(size[1]), setting))
        return self._drawn({f"{number}{who}": cells[who, number] for who, number in sorted(cells)}, "branches")

    def lengths_figure(self) -> Figure:
        """Draw the baseline's times over choreo's by tokens of an utterance, a line for each workflow (figure 7)."""
        lines: dict[str, list[tuple[int, Setting]]] = {}
        for setting in self._runs:
            lines.setdefault(setting[0], []).append((int(setting[1].rpartition("/")[2]), setting))
        return self._drawn(lines, "tokens of each utterance")

    def _drawn(self, lines: Mapping[str, list[tuple[int, Setting]]], axis: str) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(f"baseline / choreo, more is better: {title_of(self.settings)}", fontsize=9)
        for axes, (name, words) in zip(figure.subplots(1, 2), FIGURES.items(), strict=True):
            for colour, (label, points) in zip(_COLOURS * len(lines), lines.items(), strict=False):
                ratios = [(at, self.ratio(setting, "baseline", name)) for at, setting in sorted(points)]
                known = [(at, ratio) for at, ratio in ratios if ratio is not None]
                places = [at for at, _ in known]
                axes.plot(places, [ratio.ratio for _, ratio in known], marker="o", color=colour, label=label)
                bounds = [ratio.interval or (ratio.ratio, ratio.ratio) for _, ratio in known]
                lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
                axes.fill_between(places, lows, highs, color=colour, alpha=0.15, linewidth=0)
            axes.axhline(1.0, color="#222222", linestyle="--", linewidth=1)
            axes.set_xscale("log", base=2)
            ticks = sorted({at for points in lines.values() for at, _ in points})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set(xlabel=axis, ylim=(0, None))
            axes.set_title(words, loc="left", fontsize=10)
            axes.legend(frameon=False, fontsize=8)
        return figure


def _figure(record: Record, name: str) -> float:
    return mean(record["ttft_s"]) if name == "ttft" else float(record[name])
