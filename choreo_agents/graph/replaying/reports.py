"""What came of running a graph again over the answers of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from choreo_agents.tracing import table_html

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""


@dataclass(frozen=True)
class ReplayedCall:
    """One call, beside what was recorded of it."""

    run: int
    place: Place
    outcome: Literal["taken", "same", "changed", "new", "set"]
    """The record had its answer; it was decoded, and says the same as in the record, or something else; the record has
    no call in its place; its words were set."""
    differs: tuple[str, ...]
    """What of its request is not as in the record, unless that had its answer: `turn`, `model`, `sampling`, `seed`, and
    `view`, with those whose messages in it are others, as in `view (alice, bob)`."""
    recorded: str | None
    """Its words then; None: they are masked, or it was not made."""
    words: str | None
    """Its words now; None: it is confidential."""
    sampled: int
    """Tokens that were sampled for it."""

    @property
    def same(self) -> bool:
        """Whether it was asked, and has said, what the record has."""
        return self.outcome in ("taken", "same") and not self.differs


@dataclass(frozen=True)
class ReplayReport:
    """What a replay or a fork came to."""

    calls: tuple[ReplayedCall, ...]
    """In the order of runs and supersteps."""
    gone: tuple[Place, ...]
    """Recorded calls that were not made."""
    sampled: int
    """Tokens that were sampled, ..."""
    taken: int
    """... and tokens that were taken from the record, which no step has sampled."""
    values: Mapping[str, Any] = field(repr=False)
    """The state in which the last run ended."""
    differences: tuple[str, ...]
    """Runs that ended otherwise than in the record."""
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.gone and all(call.same for call in self.calls)

    @property
    def changed(self) -> tuple[ReplayedCall, ...]:
        """The messages that are not as recorded."""
        return tuple(call for call in self.calls if call.outcome in ("changed", "new", "set"))

    def _repr_html_(self) -> str:
        columns = ("run", "agent", "superstep", "outcome", "what differs", "recorded", "now")
        rows = (
            (
                each.run + 1,
                each.place[0],
                each.place[1],
                each.outcome,
                ", ".join(each.differs),
                each.recorded,
                each.words,
            )
            for each in self.calls
        )
        told = f"{len(self.changed)} of {len(self.calls)} messages are not as recorded; {self.sampled} tokens sampled"
        return table_html(told, columns, rows)
