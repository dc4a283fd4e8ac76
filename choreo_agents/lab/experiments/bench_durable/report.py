"""What pairs of runs add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from choreo_agents.lab.experiments.bench_durable.measure import CHANNELS, KINDS, LASTING, Lasting
from choreo_agents.lab.experiments.bench_sampling.report import median_interval
from choreo_agents.training.journal import Record

COLUMNS = ("", "off", "on", "on / off", "95 %")
_TIMES = {
    "engine_s": "CPU of the engine's thread, ms a token",
    "process_s": "CPU of the process, ms a token",
    "wall_s": "wall time, ms a token",
}
"""What is measured, by the name of its figure."""


@dataclass(frozen=True)
class DurableReport:
    """Pairs of one model.

    Args:
        settings: Model, dtype, threads, device, sizes, versions.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]

    def values(self, lasting: Lasting, name: str) -> list[float]:
        """A figure of all runs, for each token that was decoded."""
        runs = [record["runs"][lasting] for record in self.records]
        return [run[name] / run["tokens"] for run in runs]

    def ratios(self, name: str) -> list[float]:
        """Of each pair: with lineage to without."""
        return [on / off for on, off in zip(self.values("on", name), self.values("off", name), strict=True)]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for name, what in _TIMES.items():
            off, on = (f"{1000 * median(self.values(lasting, name)):,.3f}" for lasting in reversed(LASTING))
            low, high = median_interval(self.ratios(name))
            yield what, off, on, f"{median(self.ratios(name)):.3f}", f"{low:.3f} to {high:.3f}"

    @property
    def commits_per_call(self) -> float:
        """Of the store, for each call of a node."""
        return self._median(lambda run: run["commits"] / run["calls"])

    @property
    def bytes_per_thousand(self) -> dict[str, float]:
        """Of the file of lineage for a thousand messages: `file`, and names and values of each kind."""
        names = {"": "file", **{kind: kind for kind in KINDS}}
        return {
            said: 1000 * self._median(partial(_share, "lineage_bytes", name, lambda run: run["messages"]))
            for name, said in names.items()
        }

    @property
    def shares(self) -> dict[str, float]:
        """Of what the checkpointer's file holds, by channel."""
        return {
            name: self._median(partial(_share, "state_bytes", name, lambda run: run["state_bytes"][""]))
            for name in CHANNELS
        }

    def _median(self, figure: Callable[[Record], float]) -> float:
        return median(figure(record["runs"]["on"]) for record in self.records)

    def lines(self) -> list[str]:
        """What is written, and whether both have said the same."""
        size = self.bytes_per_thousand
        parts = ", ".join(f"{kind} {size[kind]:,.0f}" for kind in KINDS)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        alike = sum(bool(record["alike"]) for record in self.records)
        return [
            f"commits for each call of a node: {self.commits_per_call:.2f}",
            f"bytes of the lineage file for a thousand messages: {size['file']:,.0f}; of names and values {parts}",
            f"of what the checkpointer's file holds: {shares}",
            f"{'met' if alike == len(self.records) else 'missed'}: both say the same words: {alike} of "
            f"{len(self.records)} pairs",
        ]

    def title(self) -> str:
        """What the table is of."""
        said = self.settings
        threads = f"{said['threads']} thread{'' if said['threads'] == 1 else 's'}"
        return (
            f"{said['model']}, {said['dtype']}, {said['device']}, {threads}; {said['turns']} turns of a planner, "
            f"{said['workers']} workers and a writer, {said['answer']} tokens an answer; medians of "
            f"{len(self.records)} pairs"
        )

    def as_object(self) -> dict[str, Any]:
        """Settings, figures and raw rounds as plain JSON."""
        return {
            "settings": dict(self.settings),
            "ratios": {
                name: {"median": median(self.ratios(name)), "interval": list(median_interval(self.ratios(name)))}
                for name in _TIMES
            },
            "commits_per_call": self.commits_per_call,
            "bytes_per_thousand_messages": self.bytes_per_thousand,
            "shares_of_states": self.shares,
            "rounds": list(self.records),
        }


def _share(figures: str, name: str, whole: Callable[[Record], float], run: Record) -> float:
    return float(run[figures][name]) / whole(run)


def as_markdown(report: DurableReport, command: str) -> str:
    """The table, with the command that makes it again."""
    versions = ", ".join(f"{name} {report.settings[name]}" for name in ("torch", "transformers", "langgraph"))
    lines = [f"`{command}`", "", f"{report.title()}. {versions}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "--:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in report.rows()]
    return "\n".join([*lines, "", *(f"- {line}" for line in report.lines()), ""])
