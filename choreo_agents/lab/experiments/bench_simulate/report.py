"""How far what was foretold is from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from choreo_agents.lab.experiments.bench_sampling.report import median_interval
from choreo_agents.lab.experiments.bench_simulate.measure import DEBATES, ENGINES, FIGURES
from choreo_agents.training.journal import Record

COLUMNS = ("engines", "", "measured", "95 %", "simulated", "error")
BAR = 0.15
"""Errors that are still right."""
WORDS = {
    "makespan_s": ("makespan, s", 1.0),
    "calls_per_s": ("calls/s", 1.0),
    "first_token_s": ("first token, median, ms", 1000.0),
    "first_token_p95_s": ("first token, p95, ms", 1000.0),
    "moved_bytes": ("KV moved, MB", 1e-6),
}
_BARRED = ("makespan_s", "first_token_s", "first_token_p95_s", "moved_bytes")
"""Of makespan and throughput, one says the other."""


@dataclass(frozen=True)
class SimulateReport:
    """Rounds of one model.

    Args:
        settings: Model, dtype, threads, device, sizes, versions.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]

    def values(self, engines: int, how: str, name: str) -> list[float]:
        """A figure of all rounds, `measured` or `simulated`."""
        return [record["engines"][str(engines)][how][name] for record in self.records]

    def error(self, engines: int, name: str) -> float:
        """Of the medians: what was foretold to what was measured, less one; none, where both are nothing."""
        measured, simulated = (median(self.values(engines, how, name)) for how in ("measured", "simulated"))
        if not measured:
            return inf if simulated else 0.0
        return simulated / measured - 1

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for engines in ENGINES:
            for name in FIGURES:
                what, unit = WORDS[name]
                measured = self.values(engines, "measured", name)
                low, high = median_interval(measured)
                yield (
                    str(engines),
                    what,
                    f"{unit * median(measured):,.3f}",
                    f"{unit * low:,.3f} to {unit * high:,.3f}",
                    f"{unit * median(self.values(engines, 'simulated', name)):,.3f}",
                    f"{self.error(engines, name):+.1%}",
                )

    def lines(self) -> list[str]:
        """Whether the bar is met."""
        return [
            f"{'met' if abs(self.error(engines, name)) <= BAR else 'missed'}: {WORDS[name][0]} on {engines} "
            f"engine{'' if engines == 1 else 's'} foretold within {BAR:.0%}: {self.error(engines, name):+.1%}"
            for engines in ENGINES
            for name in _BARRED
        ]

    def title(self) -> str:
        """What the table is of."""
        said = self.settings
        threads = f"{said['threads']} thread{'' if said['threads'] == 1 else 's'}"
        return (
            f"{said['model']}, {said['dtype']}, {said['device']}, {threads}; {self._what()} at once, "
            f"{said['utterance']} tokens an answer; medians of {len(self.records)} rounds"
        )

    def _what(self) -> str:
        said = self.settings
        if (workload := said.get("workload", DEBATES)) != DEBATES:
            return f"{said['debates']} runs of {workload!r}"
        return f"{said['debates']} debates of {said['agents']} agents and {said['rounds']} rounds"

    def as_object(self) -> dict[str, Any]:
        """Settings, errors and raw rounds as plain JSON."""
        errors = {str(engines): {name: self.error(engines, name) for name in FIGURES} for engines in ENGINES}
        return {"settings": dict(self.settings), "errors": errors, "rounds": list(self.records)}


def as_markdown(report: SimulateReport, command: str) -> str:
    """The table, with the command that makes it again."""
    versions = ", ".join(f"{name} {report.settings[name]}" for name in ("torch", "transformers", "langgraph"))
    lines = [f"`{command}`", "", f"{report.title()}. {versions}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(row)} |" for row in report.rows()]
    return "\n".join([*lines, "", *(f"- {line}" for line in report.lines()), ""])
