"""Answers about documents as a table: each way's share of right ones, and how the others stand to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from choreo_agents.training.journal import Record
from choreo_bench.evaluation import Difference, Score
from choreo_bench.evaluation.intervals import Interval, difference_interval
from choreo_bench.experiments.eval_pml.measure import BASELINE
from choreo_bench.experiments.eval_pml.tasks import GIVEN_AWAY
from choreo_bench.harness import Report, Table

ALL = "all"
Records = Mapping[str, Mapping[str, Sequence[Record]]]
"""By way, then by task; those of two ways in the same order of problems."""


@dataclass(frozen=True)
class Gap:
    """Difference between one way and the baseline, problem by problem."""

    points: float
    """The difference of the shares solved, in points of a hundred."""
    interval: Interval | None
    """95 %: of one task inverting McNemar's test, of all by resampling problems; None of a single problem."""

    def __str__(self) -> str:
        text = f"{self.points:+.1f}"
        return text if self.interval is None else f"{text} ({self.interval[0]:+.1f} to {self.interval[1]:+.1f})"


@dataclass(frozen=True)
class DocumentReport:
    """Results of a run."""

    records: Records

    @property
    def others(self) -> list[str]:
        """The ways that are held against the baseline."""
        return [way for way in self.records if way != BASELINE]

    def tasks(self) -> list[str]:
        return list(self.records[BASELINE])

    def solved(self, way: str, task: str) -> list[bool]:
        """Problem by problem, whether all of the answer is right; of all tasks, one after the other."""
        of = self.records[way]
        return [record["score"] >= 1 for name in of if task in (ALL, name) for record in of[name]]

    def gap(self, way: str, task: str) -> Gap:
        """A way against the baseline."""
        own, base = self.solved(way, task), self.solved(BASELINE, task)
        difference = Difference.of(own, base)
        bounds = difference_interval(own, base) if task == ALL else difference.score_interval()
        interval = None if bounds is None else (100 * bounds[0], 100 * bounds[1])
        return Gap(100 * difference.share, interval)

    def cached_share(self, task: str) -> tuple[float, float]:
        """Tokens of a prompt, and the share of them that modules hold: means over the problems of a way with modules.

        Nothing is known of a run without one.
        """
        of = next((self.records[way] for way in self.others), {})
        records = [record for name in of if task in (ALL, name) for record in of[name]]
        if not records:
            return 0.0, 0.0
        cached = mean(record["cached_tokens"] for record in records)
        whole = cached + mean(record["fresh_tokens"] for record in records)
        return whole, cached / whole

    def report(self, weights: str) -> Report:
        """Report a row for each task, and one for all."""
        columns = ["task", "tokens", "cached, %", f"{BASELINE}, %"]
        columns += [cell for way in self.others for cell in (f"{way}, %", "difference")]
        rows = [self._row(task) for task in [*self.tasks(), ALL]]
        rows[-1][0] = f"**{ALL}**"
        lines = ["*: the answer follows from what stands before the documents: they need not be read"]
        head = f"Weights: `{weights[:16]}`."
        return Report([Table(columns, rows, "Solved, %; in brackets 95 % intervals")], self.as_object(), head, lines)

    def _row(self, task: str) -> list[str]:
        tokens, share = self.cached_share(task)
        cells = [f"{task}*" if task in GIVEN_AWAY else task, f"{tokens:,.0f}", f"{100 * share:.0f}"]
        cells.append(self._share(BASELINE, task))
        for way in self.others:
            cells += [self._share(way, task), str(self.gap(way, task))]
        return cells

    def _share(self, way: str, task: str) -> str:
        solved = self.solved(way, task)
        return str(Score(sum(solved), len(solved)))

    def as_object(self) -> dict[str, Any]:
        """Shares and differences as plain JSON."""
        rows: dict[str, Any] = {}
        for task in [*self.tasks(), ALL]:
            tokens, cached = self.cached_share(task)
            rows[task] = {"n": len(self.solved(BASELINE, task)), "tokens": tokens, "cached_share": cached}
            rows[task]["solved"] = {way: mean(self.solved(way, task)) for way in self.records}
            rows[task]["right"] = {way: self._right(way, task) for way in self.records}
            rows[task]["difference"] = {
                way: {"points": gap.points, "interval": gap.interval}
                for way in self.others
                for gap in [self.gap(way, task)]
            }
        return rows

    def _right(self, way: str, task: str) -> float:
        """The mean share of an answer that is right."""
        of = self.records[way]
        return mean(float(record["score"]) for name in of if task in (ALL, name) for record in of[name])
