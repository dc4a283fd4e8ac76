"""What so many engines would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class SimulatedOutcome:
    """Of all calls."""

    engines: int
    fronts: int
    calls: int
    samples: int
    """Tokens that were sampled."""
    makespan_s: float
    """From the first run's begin to the last one's end."""
    first_token_s: tuple[float, ...]
    """From when each call that samples was due to its first token."""
    run_s: tuple[float, ...]
    """Of each run, from its begin to its end."""
    bytes_moved: int
    """Of KV, between engines."""
    copies: int
    """Messages."""
    copies_refused: int
    """Messages that were not where they were to be copied from when their turn came."""
    calls_moved: int
    """That ran elsewhere than the one before of their thread."""
    tokens_first: int
    """Encoded of messages that calls read, by whoever was first."""
    tokens_again: int
    """Encoded of messages that another engine had encoded, or the same one before."""
    tokens_decoded: int
    """Encoded of calls' own turns."""
    engines_busy_s: tuple[float, ...]
    front_busy_s: float
    """Of all fronts."""
    directory_busy_s: float
    """Which one front by itself has not."""
    directory_ids: int
    """That the directory was asked for or told."""
    most_tokens_held: int
    """Of KV, by the engine that held most."""
    steps: int

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.makespan_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.makespan_s

    @property
    def tokens_encoded(self) -> int:
        """All that engines have encoded."""
        return self.tokens_first + self.tokens_again + self.tokens_decoded

    @property
    def utilisation(self) -> float:
        """The share of the time in which an engine computes, on average."""
        return sum(self.engines_busy_s) / (len(self.engines_busy_s) * self.makespan_s)

    @property
    def front_load(self) -> float:
        """The same of a front."""
        return self.front_busy_s / (self.fronts * self.makespan_s)

    @property
    def directory_load(self) -> float:
        """The same of the directory."""
        return self.directory_busy_s / self.makespan_s

    def first_token(self, percent: float) -> float | None:
        """The waiting time for a first token that so many calls in a hundred do not exceed; None: none sampled."""
        return percentile(self.first_token_s, percent)

    def as_object(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "engines": self.engines,
            "fronts": self.fronts,
            "calls": self.calls,
            "samples": self.samples,
            "makespan_s": self.makespan_s,
            "calls_per_s": self.calls_per_s,
            "samples_per_s": self.samples_per_s,
            "first_token_s": {f"p{percent}": self.first_token(percent) for percent in PERCENTILES},
            "run_s": {f"p{percent}": percentile(self.run_s, percent) for percent in PERCENTILES},
            "bytes_moved": self.bytes_moved,
            "copies": self.copies,
            "copies_refused": self.copies_refused,
            "calls_moved": self.calls_moved,
            "tokens_first": self.tokens_first,
            "tokens_again": self.tokens_again,
            "tokens_decoded": self.tokens_decoded,
            "utilisation": self.utilisation,
            "front_load": self.front_load,
            "directory_load": self.directory_load,
            "directory_ids": self.directory_ids,
            "most_tokens_held": self.most_tokens_held,
            "steps": self.steps,
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least of the values that so many in a hundred do not exceed."""
    if not values:
        return None
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(rank) - 1]
