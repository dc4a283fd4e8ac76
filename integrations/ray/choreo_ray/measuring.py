"""What Ray takes for a call and for a copy, on the machines where the actors are: measured when a front begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import ray

from choreo_agents.engine.elsewhere import Costs

_TIMES = 5
_SMALL, _LARGE = 1 << 12, 1 << 24
"""Bytes that are copied: what the large takes longer is the bytes' own."""
_LEAST_S = 1e-9


def measured_costs(actors: Sequence[Any]) -> Costs:
    """Costs of this cluster, in a quarter of a second; of engines they say nothing, which measure their own pace.

    Args:
        actors: Handles of `EngineActor`s that have begun; with one alone, copies cost what they usually do.
    """
    usual = Costs()
    call_s = _median(lambda: ray.get(actors[0].there.remote()))
    if len(actors) == 1:
        return Costs(call_s=call_s)
    small_s, large_s = (_median(partial(_copy, actors[0], actors[1], nbytes)) for nbytes in (_SMALL, _LARGE))
    rate = (_LARGE - _SMALL) / max(_LEAST_S, large_s - small_s)
    return Costs(call_s=call_s, copy_s=small_s, copy_bytes_per_s=min(rate, 100 * usual.copy_bytes_per_s))


def _copy(source: Any, to: Any, nbytes: int) -> None:
    ray.get(to.weighed.remote(ray.get(source.weight.remote(nbytes))))


def _median(work: Callable[[], object]) -> float:
    work()  # it makes what the others copy
    took: list[float] = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return median(took)
