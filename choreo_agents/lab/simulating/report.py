"""What simulations with several numbers of engines add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choreo_agents.lab.simulating.costs import KnownCosts, as_plain
from choreo_agents.lab.simulating.outcome import PERCENTILES, SimulatedOutcome

_COLUMNS = (
    "engines",
    "calls/s",
    "tokens/s",
    *(f"first token p{percent}, ms" for percent in PERCENTILES),
    "moved, MB",
    "encoded again",
    "calls moved",
    "engines busy",
    "front",
)
_DIRECTORY = "directory"
"""Which several fronts have."""
_SATURATED = 0.9
"""The share of the time in which something is busy, from which on it is what others wait for."""


@dataclass(frozen=True)
class SimulationReport:
    """Of one workload.

    Args:
        settings: What was simulated, as plain JSON.
        known: Costs.
        outcomes: By the number of engines.
        notes: What was left out.
    """

    settings: Mapping[str, Any]
    known: KnownCosts
    outcomes: Sequence[SimulatedOutcome]
    notes: Sequence[str] = ()

    def title(self) -> str:
        """What the table is of."""
        said, first = self.settings, self.outcomes[0]
        how = (
            "all at once"
            if said["rate"] is None
            else f"{said['rate']:g} threads begun in a second, seed {said['seed']}"
        )
        fronts = "one front" if first.fronts == 1 else f"{first.fronts} fronts"
        copies = "" if said["copies"] == 1 else f" in {said['copies']} copies"
        what = f"{first.calls:,} calls, {first.samples:,} tokens sampled"
        return f"{what}: {', '.join(said['traces'])}{copies}; {how}; {fronts}"

    def columns(self) -> tuple[str, ...]:
        """Of the table."""
        return (*_COLUMNS, _DIRECTORY) if self._has_directory else _COLUMNS

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        return [
            (*_cells(outcome), f"{outcome.directory_load:.1%}") if self._has_directory else _cells(outcome)
            for outcome in self.outcomes
        ]

    def lines(self) -> list[str]:
        """What becomes the bound, and when."""
        last, costs = self.outcomes[-1], self.known.costs
        each_s = last.front_busy_s / last.calls
        found = [self._bound("a front", [(each.engines, each.front_load) for each in self.outcomes])]
        if each_s:
            found[0] += f"; {last.fronts / each_s:,.0f} calls/s at most, {1000 * each_s:.2f} ms each"
        if self._has_directory:
            found.append(self._directory_line())
        held = max(each.most_tokens_held for each in self.outcomes)
        nbytes = held * (costs.bytes_per_token or 0)
        return [
            *found,
            f"an engine holds up to {held:,} tokens of KV, {nbytes / 1e6:,.0f} MB; memory is no bound here",
        ]

    def as_object(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {
            "settings": dict(self.settings),
            "costs": as_plain(self.known.costs),
            "measured": list(self.known.sources),
            "notes": [*self.known.notes, *self.notes],
            "outcomes": [outcome.as_object() for outcome in self.outcomes],
        }

    @property
    def _has_directory(self) -> bool:
        return any(each.fronts > 1 for each in self.outcomes)

    def _directory_line(self) -> str:
        ids = max(each.directory_ids / each.calls for each in self.outcomes)
        directory_s = max(each.directory_busy_s / each.calls for each in self.outcomes)
        asked = self._bound("the directory", [(each.engines, each.directory_load) for each in self.outcomes])
        return f"{asked}; {1 / directory_s:,.0f} calls/s at most, {ids:.1f} ids each" if directory_s else asked

    def _bound(self, who: str, loads: Sequence[tuple[int, float]]) -> str:
        full = next((engines for engines, load in loads if load >= _SATURATED), None)
        most = max(load for _, load in loads)
        return (
            f"{who} is what calls wait for from {full} engines on"
            if full is not None
            else f"{who} is busy for {most:.1%} of the time at most"
        )


def _cells(outcome: SimulatedOutcome) -> tuple[str, ...]:
    first = [outcome.first_token(percent) for percent in PERCENTILES]
    return (
        f"{outcome.engines:,}",
        f"{outcome.calls_per_s:,.1f}",
        f"{outcome.samples_per_s:,.0f}",
        *("" if seconds is None else f"{1000 * seconds:,.1f}" for seconds in first),
        f"{outcome.bytes_moved / 1e6:,.1f}",
        f"{outcome.tokens_again:,}",
        f"{outcome.calls_moved:,}",
        f"{outcome.utilisation:.0%}",
        f"{outcome.front_load:.0%}",
    )
