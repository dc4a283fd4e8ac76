"""Fronts over two actors of Ray's, in the place of an engine: the same actors for all tests of a worker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from choreo_agents import Engine
from choreo_agents.engine import engine_over
from choreo_agents.models import LoadedModel
from support.elsewhere import FRONTS
from support.ray_cluster import cluster, keep_at_hand

_ENGINES = 2


@contextmanager
def actors(shared: Path) -> Iterator[Callable[..., Engine]]:
    """What takes the arguments of `Engine.load`, and has two actors load it, each anew.

    Args:
        shared: A folder of this run of tests.
    """
    keep_at_hand(os.environ)
    import ray
    from choreo_ray.actor import EngineActor, Loading
    from choreo_ray.far import RayFarEngine

    class ReloadingActor(EngineActor):
        """Loads another engine when it is told to."""

        async def reload(self, loading: Loading) -> None:
            """End the engine; the next is loaded by the first who needs it, and knows nothing of this one."""
            await self.close()
            self._loading, self._incarnation = loading, secrets.token_hex(8)

    with cluster(shared) as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=secrets.token_hex(4))
        options = {"num_cpus": 0, "max_concurrency": 1 << 10}
        loading = Loading("embedded", 1, {})
        named = [f"engine {number}" for number in range(_ENGINES)]
        there = {name: ray.remote(ReloadingActor).options(**options).remote(name, loading) for name in named}

        def load(model: Any = "embedded", **options: Any) -> Engine:
            own = {name: options.pop(name) for name in FRONTS if name in options}
            own |= {name: options[name] for name in ("adapter", "memory", "chat") if name in options}
            path = model.name if isinstance(model, LoadedModel) else model
            ray.get([actor.reload.remote(Loading(str(path), 1, options)) for actor in there.values()])
            far = [RayFarEngine(name, actor) for name, actor in there.items()]
            return engine_over(far, path, **own)

        try:
            yield load
        finally:
            for actor in there.values():
                ray.kill(actor)
            ray.shutdown()
