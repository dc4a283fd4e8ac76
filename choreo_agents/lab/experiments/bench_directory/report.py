"""What a directory does in a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from choreo_agents.lab.experiments.bench_directory.measure import KINDS, Asked, key_of, saturated
from choreo_agents.lab.simulating.costs import CostsFile
from choreo_agents.training.journal import Record

COLUMNS = ("", "clients", "ids/s", "requests/s", "p50, ms", "p95, ms")


@dataclass(frozen=True)
class DirectoryReport:
    """Rounds of one directory.

    Args:
        settings: Sizes and machine.
        records: As in a journal.
        repeats: Rounds.
    """

    settings: Mapping[str, Any]
    records: Mapping[str, Record]
    repeats: int

    def rate(self, kind: Asked, clients: int) -> float:
        """Ids in a second; the median of all rounds."""
        return self._median(kind, clients, "ids_per_s")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for kind in KINDS:
            for clients in self.settings["clients"]:
                ids = self.settings["per_request"] * (1 if kind == "lookups" else 2)
                rate = self.rate(kind, clients)
                times = (f"{1000 * self._median(kind, clients, name):.3f}" for name in ("p50_s", "p95_s"))
                yield (kind, str(clients), f"{rate:,.0f}", f"{rate / ids:,.0f}", *times)

    def lines(self) -> list[str]:
        """Where it saturates."""
        found = [f"filled with {self.settings['ids']:,} ids at {self.records['fill']['ids_per_s']:,.0f} ids/s"]
        for kind in KINDS:
            rates = self._rates(kind)
            full = saturated(rates)
            found.append(f"{kind} saturate with {full} client{'' if full == 1 else 's'}: {rates[full]:,.0f} ids/s")
        return found

    def costs(self) -> CostsFile:
        """For a simulation: of an id that is asked for or told, whichever takes longer."""
        return CostsFile(costs={"lookup_s": 1 / min(max(self._rates(kind).values()) for kind in KINDS)})

    def title(self) -> str:
        """What the table is of."""
        said = self.settings
        return (
            f"{said['directory']}, {said['ids']:,} ids in {said['engines']} engines, {said['per_request']} ids a "
            f"request; medians of {self.repeats} rounds"
        )

    def as_object(self) -> dict[str, Any]:
        """Settings and raw rounds as plain JSON."""
        return {
            "settings": dict(self.settings),
            "costs": dict(self.costs().costs),
            "rounds": list(self.records.values()),
        }

    def _rates(self, kind: Asked) -> dict[int, float]:
        return {clients: self.rate(kind, clients) for clients in self.settings["clients"]}

    def _median(self, kind: Asked, clients: int, name: str) -> float:
        return float(median(self.records[key_of(kind, clients, number)][name] for number in range(self.repeats)))


def as_markdown(report: DirectoryReport, command: str) -> str:
    """The table, with the command that makes it again."""
    lines = [f"`{command}`", "", f"{report.title()}.", "", f"| {' | '.join(COLUMNS)} |"]
    lines += ["|---|" + "--:|" * (len(COLUMNS) - 1), *(f"| {' | '.join(row)} |" for row in report.rows())]
    return "\n".join([*lines, "", *(f"- {line}" for line in report.lines()), ""])
