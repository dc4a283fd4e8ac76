"""Times, and the costs that explain them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np


def timed_s(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fitted(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """What each column of the rows costs, by least squares; what would cost less than nothing costs nothing.

    Args:
        rows: How much of each there was.
        values: What it took.
    """
    left = list(range(len(rows[0])))
    while left:
        matrix = np.array([[row[place] for place in left] for row in rows])
        found, *_ = np.linalg.lstsq(matrix, np.array(values), rcond=None)
        if min(found) >= 0:
            by_place = dict(zip(left, found, strict=True))
            return [float(by_place.get(place, 0.0)) for place in range(len(rows[0]))]
        left.pop(int(np.argmin(found)))
    return [0.0] * len(rows[0])
