"""Bootstrap intervals over problems, and how intervals are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Interval = tuple[float, float]
_RESAMPLES = 10_000


def median_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of a median; None of fewer than two values."""
    return _interval(np.median, values)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """95 % interval of the difference of two means, over pairs; None of fewer than two pairs."""
    return _interval(lambda a, b: a.mean() - b.mean(), first, second)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of a mean; None of fewer than two values."""
    return _interval(lambda a: a.mean(), values)


def points(share: float | None, interval: Interval | None, *, signed: bool = False) -> str:
    """Write a share in points of a hundred, with its interval in brackets as far as there are any."""
    if share is None:
        return ""
    middle, *bounds = (f"{100 * value:{'+' * signed}.1f}" for value in (share, *(interval or ())))
    return f"{middle} ({' to '.join(bounds)})" if bounds else middle


def _interval(statistic: Callable[..., Any], *samples: Sequence[float]) -> Interval | None:
    """Compute the percentile interval of a statistic over paired samples, always with the same resamples."""
    if len(samples[0]) < 2:
        return None
    values = np.array(samples, dtype=float)  # [samples, pairs]: as many of each, or it raises
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(samples[0]), len(samples[0])) for _ in range(_RESAMPLES)]
    low, high = np.percentile([statistic(*values[:, places]) for places in drawn], (2.5, 97.5))
    return float(low), float(high)
