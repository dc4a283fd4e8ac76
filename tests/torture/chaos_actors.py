"""The actors under chaos: a front over two of them on a cluster of their own, and how their processes are found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.ray_cluster import cluster, keep_at_hand

from choreo_agents import Engine, Memory
from choreo_agents.tracing import EventSink

_MEMORY = Memory(kv_budget_bytes=1 << 26)


@contextmanager
def started(sink: EventSink) -> Iterator[tuple[Engine, Callable[[], dict[str, int]]]]:
    """A front, and what finds the process of each actor that answers, by its name."""
    keep_at_hand(os.environ)
    import ray
    from choreo_ray import RayEngine
    from ray.exceptions import GetTimeoutError, RayError

    with tempfile.TemporaryDirectory() as shared, cluster(Path(shared)) as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        front = RayEngine.load("embedded", engines=2, num_cpus=1, memory=_MEMORY, sink=sink)

        def pids() -> dict[str, int]:
            found: dict[str, int] = {}
            for far in front._actors.far if front._actors else ():
                with suppress(RayError, GetTimeoutError):
                    found[far.name] = ray.get(far.actor.there.remote(), timeout=0.5)
            return found

        try:
            yield front, pids
        finally:
            front.close()
            ray.shutdown()
