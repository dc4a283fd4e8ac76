"""What a journal of workflow runs adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from choreo_agents.training.journal import Record
from choreo_bench.evaluation.intervals import Interval, ratio_interval

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
Setting = tuple[str, str]
"""A scenario, and its lengths as `64/128/256`."""


@dataclass(frozen=True)
class Ratio:
    """A method's mean over choreo's, on the problems that both ran."""

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

    def settings_found(self) -> list[Setting]:
        return list(self._runs)

    def methods(self, setting: Setting) -> list[str]:
        return sorted(self._runs[setting], key=lambda m: ("choreo", "baseline", "naive").index(m) if m in _OURS else 9)

    def ratio(self, setting: Setting, method: str, figure: str) -> Ratio | None:
        """`figure` is `ttft` or `end_to_end_s`; None if no problem was run by both."""
        runs = self._runs.get(setting, {})
        both = sorted(set(runs.get(method, {})) & set(runs.get("choreo", {})))
        if not both:
            return None
        above = [_figure(runs[method][problem], figure) for problem in both]
        below = [_figure(runs["choreo"][problem], figure) for problem in both]
        return Ratio(mean(above) / mean(below), ratio_interval(above, below))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for setting in self._runs:
            for method in self.methods(setting):
                yield self._row(setting, method)

    def _row(self, setting: Setting, method: str) -> tuple[str, ...]:
        runs = list(self._runs[setting][method].values())

        def middle(figure: str) -> float:
            return mean(_figure(run, figure) for run in runs)

        ratios = [self.ratio(setting, method, figure) for figure in ("ttft", "end_to_end_s")]
        against = ["" if ratio is None or method == "choreo" else ratio.words() for ratio in ratios]
        counts = [f"{middle(name):,.0f}" if name in runs[0] else "" for name in ("tokens_encoded", "tokens_reused")]
        rows = f"{middle('rows_per_decode_step'):.1f}" if "rows_per_decode_step" in runs[0] else "1.0"
        times = [f"{1000 * middle('ttft'):,.0f}", f"{middle('end_to_end_s'):,.2f}"]
        name = f"{setting[0]}, {setting[1]}"
        return (name, method, str(len(runs)), *times, *counts, rows, *against)

    def title(self) -> str:
        said = self.settings
        return (
            f"{said['model']}, {said['dtype']}, {said['device']}, {said['threads']} thread"
            f"{'' if said['threads'] == 1 else 's'}; lengths: system/problem/utterance"
        )

    def as_object(self) -> dict[str, Any]:
        """Settings, ratios and raw runs as plain JSON."""
        ratios: list[dict[str, Any]] = []
        for setting in self._runs:
            for method in self.methods(setting):
                for figure in ("ttft", "end_to_end_s"):
                    found = self.ratio(setting, method, figure)
                    if found is not None and method != "choreo":
                        row = {"scenario": setting[0], "lengths": setting[1], "method": method, "figure": figure}
                        ratios.append({**row, "ratio": found.ratio, "interval": found.interval})
        return {"settings": dict(self.settings), "ratios": ratios, "runs": list(self.records)}


_OURS = ("choreo", "baseline", "naive")


def _figure(record: Record, name: str) -> float:
    return mean(record["ttft_s"]) if name == "ttft" else float(record[name])


def as_markdown(report: WorkflowReport, command: str) -> str:
    """The table, with the command that makes it again."""
    versions = ", ".join(f"{name} {report.settings[name]}" for name in ("torch", "transformers", "langgraph"))
    lines = [f"`{command}`", "", f"{report.title()} in tokens. {versions}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---" + "|--:" * (len(COLUMNS) - 2) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in report.rows()]
    return "\n".join([*lines, ""])
