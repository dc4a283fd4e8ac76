"""Bootstrap intervals over problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Interval = tuple[float, float]
_RESAMPLES = 10_000


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """95 % interval of the ratio of two means, over pairs; None of fewer than two pairs."""
    return _interval(lambda a, b, axis: a.mean(axis=axis) / b.mean(axis=axis), above, below)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """95 % interval of the difference of two means, over pairs; None of fewer than two pairs."""
    return _interval(lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis), first, second)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of a mean; None of fewer than two values."""
    return _interval(lambda a, axis: a.mean(axis=axis), values)


def _interval(statistic: Callable[..., Any], *samples: Sequence[float]) -> Interval | None:
    """By percentiles, always with the same resamples."""
    if len(samples[0]) < 2:
        return None
    from scipy.stats import bootstrap  # noqa: PLC0415 - takes a second, and most commands print no interval of means

    found = bootstrap(
        tuple(np.asarray(each, dtype=float) for each in samples),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        random_state=0,
    ).confidence_interval
    return float(found.low), float(found.high)
