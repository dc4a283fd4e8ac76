"""Which rule is worth what, and where each of them loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choreo_agents.lab.experiments.bench_routing.measure import key_of
from choreo_agents.training.journal import Record

FIGURES = {
    "run_s": ("mean time of a run, ms", 1000.0),
    "first_token_p95_s": ("first token, p95, ms", 1000.0),
    "bytes_moved": ("KV moved, MB", 1e-6),
    "tokens_again": ("tokens encoded again, thousands", 1e-3),
}
"""What tables are of, and in which unit."""
_LOSES = 1.05
"""So many times the best time of a run."""


@dataclass(frozen=True)
class RoutingReport:
    """Simulations of one set of costs.

    Args:
        settings: What was simulated.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Mapping[str, Record]

    @property
    def rules(self) -> list[str]:
        return list(self.settings["rules"])

    def columns(self) -> tuple[str, ...]:
        """Of each table."""
        return ("workload", "load", "engines", *self.rules)

    def places(self) -> Iterator[tuple[str, float, int]]:
        """Workloads, loads and engines."""
        for workload in self.settings["workloads"]:
            for load in self.settings["loads"]:
                for engines in self.settings["engines"]:
                    yield workload, load, engines

    def rows(self, figure: str) -> Iterator[tuple[str, ...]]:
        """Cells of the table of a figure, the best of each row in bold where it is a time."""
        _, unit = FIGURES[figure]
        for place in self.places():
            values = [unit * self._record(place, rule)[figure] for rule in self.rules]
            shown = [f"{value:,.1f}" for value in values]
            if figure.endswith("_s"):
                shown = [
                    f"**{each}**" if value <= 1.01 * min(values) else each
                    for each, value in zip(shown, values, strict=True)
                ]
            yield (place[0], f"{place[1]:g}", str(place[2]), *shown)

    def lines(self) -> list[str]:
        """Where each rule loses, and how much at worst."""
        found: list[str] = []
        for rule in self.rules:
            ratios = {place: self._ratio(place, rule) for place in self.places()}
            lost = [place for place, ratio in ratios.items() if ratio > _LOSES]
            worst = max(ratios, key=ratios.__getitem__)
            mean = sum(ratios.values()) / len(ratios)
            where = f"{worst[0]}, load {worst[1]:g}, engines {worst[2]}"
            found.append(
                f"{rule}: {mean:.2f} of the best on average; more than 5 % slower in {len(lost)} of {len(ratios)} "
                f"places, at worst {ratios[worst]:.2f} ({where})"
            )
        return found

    def as_object(self) -> dict[str, Any]:
        """Settings and raw figures as plain JSON."""
        return {"settings": dict(self.settings), "simulations": list(self.records.values())}

    def _record(self, place: tuple[str, float, int], rule: str) -> Record:
        return self.records[key_of(*place, rule)]

    def _ratio(self, place: tuple[str, float, int], rule: str) -> float:
        best = min(self._record(place, each)["run_s"] for each in self.rules)
        return float(self._record(place, rule)["run_s"] / best)


def as_markdown(report: RoutingReport, command: str, figures: Sequence[str] = tuple(FIGURES)) -> str:
    """The tables, with the command that makes them again."""
    costs = ", ".join(f"{name} {value:g}" for name, value in report.settings["costs"].items() if value)
    lines = [f"`{command}`", "", f"Costs: {costs}.", "", *(f"- {line}" for line in report.lines())]
    for figure in figures:
        what = FIGURES[figure][0]
        lines += ["", f"{what[0].upper()}{what[1:]}:", "", f"| {' | '.join(report.columns())} |"]
        lines += ["|---|--:|--:|" + "--:|" * len(report.rules)]
        lines += [f"| {' | '.join(row)} |" for row in report.rows(figure)]
    return "\n".join([*lines, ""])
