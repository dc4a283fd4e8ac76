"""Counts of right answers, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z = 1.96
"""Of a 95 % interval."""


@dataclass(frozen=True)
class Score:
    """Right answers out of so many."""

    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{100 * self.share:.1f} ({100 * low:.0f}-{100 * high:.0f})"

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share."""
        n, p = self.count, self.share
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Difference:
    """Difference between two ways of answering the same problems."""

    gained: int
    """Problems that only the first gets right."""
    lost: int
    """Problems that only the second gets right."""
    count: int

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> Difference:
        """Compare two ways problem by problem."""
        pairs = list(zip(first, second, strict=True))
        return cls(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs), len(pairs))

    @property
    def share(self) -> float:
        """The difference of the two shares."""
        return (self.gained - self.lost) / self.count

    def interval(self) -> tuple[float, float]:
        """Wald's 95 % interval of a paired difference, with half a problem added to either side (Agresti and Min)."""
        n, gained, lost = self.count + 2, self.gained + 0.5, self.lost + 0.5
        middle = (gained - lost) / n
        half = Z * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
        return max(-1.0, middle - half), min(1.0, middle + half)

    def score_interval(self) -> tuple[float, float]:
        """The 95 % interval of a paired difference that inverts McNemar's test (the score interval of Tango, 1998)."""

        def statistic(difference: float) -> float:
            """McNemar's for a difference other than none; at 0 it is McNemar's own."""
            n, b, c = self.count, self.gained, self.lost
            linear = -b - c + (2 * n - b + c) * difference
            constant = -c * difference * (1 - difference)
            lost = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
            variance = n * (2 * lost + difference * (1 - difference))
            return (b - c - n * difference) / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, b - c)

        low = _root(lambda difference: statistic(difference) > Z, -1.0, self.share)
        high = _root(lambda difference: statistic(difference) > -Z, self.share, 1.0)
        return low, high


def _root(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Up to where a condition holds, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
