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
        # With a salt, and a name that other fronts might have engines by: then there is a directory.
        front = RayEngine.load(
            "embedded", engines=2, name="chaos", directories=1, memory=_MEMORY, salt="chaos", sink=sink
        )
        actors = {each: ray.get_actor(f"chaos-{each}", "choreo") for each in ("0", "1", "directory-0")}

        def pids() -> dict[str, int]:
            found: dict[str, int] = {}
            for name, actor in actors.items():
                with suppress(RayError, GetTimeoutError):
                    found[name.removesuffix("-0")] = ray.get(actor.there.remote(), timeout=0.5)
            return found

        try:
            yield front, pids
        finally:
            front.close()
            RayEngine.end("chaos")
            ray.shutdown()
