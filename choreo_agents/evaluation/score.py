"""Counts of right answers, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z = 1.96
"""Of a 95 % interval."""
TAIL = 0.025
"""What such an interval leaves out on either side."""


@dataclass(frozen=True)
class Score:
    """Right answers out of so many."""

    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share."""
        n, p = self.count, self.share
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Difference:
    """How much more often one way is right than another, on the same problems."""

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

    def exact_interval(self) -> tuple[float, float]:
        """The 95 % interval that belongs to McNemar's exact test: Clopper and Pearson's for the share of discordant
        problems that were gained, given how many are discordant."""
        discordant = self.gained + self.lost
        if not discordant:
            return 0.0, 0.0
        low = _bound(lambda p: _at_least(self.gained, discordant, p) < TAIL) if self.gained else 0.0
        high = _bound(lambda p: 1 - _at_least(self.gained + 1, discordant, p) > TAIL) if self.lost else 1.0
        scale = discordant / self.count
        return (2 * low - 1) * scale, (2 * high - 1) * scale


def _at_least(successes: int, trials: int, chance: float) -> float:
    """Probability of so many successes or more."""
    if successes <= 0:
        return 1.0
    if chance <= 0.0 or chance >= 1.0:
        return float(chance >= 1.0)
    terms = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(chance)
        + (trials - k) * math.log1p(-chance)
        for k in range(successes, trials + 1)
    )
    return min(1.0, sum(math.exp(term) for term in terms))


def _bound(holds: Callable[[float], bool]) -> float:
    """Up to where a condition on a probability holds, by halving."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
