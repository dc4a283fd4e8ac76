"""The actors under chaos: a front over two of them on a cluster of their own, and how their processes are found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from support.ray_cluster import cluster, keep_at_hand

from choreo_agents import Engine, Memory
from choreo_agents.tracing import EventSink

_MEMORY = Memory(kv_budget_bytes=1 << 26)
_ANSWER_S = 0.5


@contextmanager
def started(sink: EventSink) -> Iterator[tuple[Engine, Callable[[], list[int]]]]:
    """A front, and what finds the process of each actor that answers."""
    keep_at_hand(os.environ)
    import ray
    from choreo_ray import RayEngine

    with tempfile.TemporaryDirectory() as shared, cluster(Path(shared)) as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        front = RayEngine.load("embedded", engines=2, name="chaos", memory=_MEMORY, sink=sink)
        try:
            yield front, partial(pids, "chaos", "choreo")
        finally:
            front.close()
            RayEngine.end("chaos")
            ray.shutdown()


def pids(name: str, namespace: str) -> list[int]:
    """The processes of a front's two engines, as far as they answer."""
    import ray
    from ray.exceptions import RayError

    found: list[int] = []
    for number in range(2):
        with suppress(RayError, ValueError):
            actor = ray.get_actor(f"{name}-{number}", namespace)
            found.append(ray.get(actor.there.remote(), timeout=_ANSWER_S))
    return found
