"""What came of playing a recording again, or of forking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from choreo_agents.tracing import table_html

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""


@dataclass(frozen=True)
class ReplayedCall:
    """One call, beside what was recorded of it."""

    run: int
    place: Place
    recorded: str | None
    """Its words then; None: they are masked, or it was not made."""
    words: str | None
    """Its words now; None: it was not made, or is confidential."""
    difference: str | None
    """The first; None: there is none."""


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found."""

    expect: Literal["words", "bits"]
    calls: tuple[ReplayedCall, ...]
    """In the order of supersteps."""
    given: int
    """Functions whose recorded results were given, ..."""
    ran: tuple[str, ...]
    """... and those that were run."""
    differences: tuple[str, ...]
    """Beside those of calls: of a final state, of how a run ended, and why it could not be played to its end."""
    notes: tuple[str, ...]
    """What was not compared, and why."""
    steps: int
    """Forward passes."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and all(call.difference is None for call in self.calls)

    def _repr_html_(self) -> str:
        rows = ((*_of(call.run, call.place), call.recorded, call.words, call.difference) for call in self.calls)
        columns = ("run", "agent", "superstep", "recorded", "now", "difference")
        return table_html("the same as recorded" if self.same else "not as recorded", columns, rows)


@dataclass(frozen=True)
class ForkedCall:
    """One call of a fork."""

    run: int
    place: Place
    outcome: Literal["taken", "same", "changed", "new", "set"]
    """Its recorded tokens were taken; it was computed again, and says the same; or something else; it was made in the
    fork only; its words were set."""
    recorded: str | None
    words: str | None
    """Now; None: confidential."""
    sampled: int
    """Tokens that were sampled for it."""


@dataclass(frozen=True)
class RouteChange:
    """Where a fork went another way."""

    run: int
    graph: str
    """The subgraph; empty: the graph itself."""
    after: tuple[str, ...]
    """The nodes that had run before."""
    recorded: tuple[str, ...]
    """Those that ran then, ..."""
    now: tuple[str, ...]
    """... and those that ran now."""
    follows: tuple[tuple[str, ...], ...]
    """What ran after these, superstep by superstep."""


@dataclass(frozen=True)
class ForkReport:
    """What a fork came to."""

    calls: tuple[ForkedCall, ...]
    gone: tuple[Place, ...]
    """Recorded calls that were not made."""
    given: int
    """Functions whose recorded results were given, ..."""
    ran: tuple[str, ...]
    """... and those that were run."""
    route: RouteChange | None
    sampled: int
    """Tokens that were sampled, ..."""
    taken: int
    """... and tokens that were taken as recorded, which no step has sampled."""
    values: Mapping[str, Any]
    """The state in which the last run ended."""
    notes: tuple[str, ...]

    @property
    def changed(self) -> tuple[ForkedCall, ...]:
        """The messages that are not as recorded."""
        return tuple(call for call in self.calls if call.outcome in ("changed", "new", "set"))

    def _repr_html_(self) -> str:
        rows = ((*_of(call.run, call.place), call.outcome, call.recorded, call.words) for call in self.calls)
        columns = ("run", "agent", "superstep", "outcome", "recorded", "now")
        told = f"{len(self.changed)} of {len(self.calls)} messages are not as recorded; {self.sampled} tokens sampled"
        return table_html(told, columns, rows)


def _of(run: int, place: Place) -> tuple[int, str, int]:
    """A run's number as people count, who speaks, and in which superstep."""
    return run + 1, place[0], place[1]
