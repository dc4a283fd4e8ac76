"""Fronts over actors of Ray's, in the place of an engine: pairs of actors that serve one router after the other."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from choreo_ray.remote import remote_engine
from remote_support.loopback import FRONTS
from support.ray_cluster import cluster, keep_at_hand

from choreo_agents import Engine
from choreo_agents.models import LoadedModel, load_model

TESTS = Path(__file__).parents[4] / "tests"
_ENGINES = 2


class RayRouter(Engine):
    """A router over a pair of actors, which are another's when it is closed."""

    free: list[Any]
    pair: Any

    def close(self) -> None:
        super().close()
        if self.pair not in self.free:
            self.free.append(self.pair)


@cache
def chats(path: str) -> object:
    """As a model has it that is loaded there."""
    return load_model(path).chat


@contextmanager
def actors(shared: Path) -> Iterator[Callable[..., Engine]]:
    """What takes the arguments of `Engine.load`, and has a pair of actors load it, each anew.

    Args:
        shared: A folder of this run of tests.
    """
    keep_at_hand(os.environ)
    import ray
    from choreo_ray.actor import EngineActor, Loading
    from choreo_ray.client import RayEngineClient
    from choreo_ray.placing import absolute

    class ReloadingActor(EngineActor):
        """Loads another engine when it is told to."""

        def __init__(self, *given: Any) -> None:
            # What tests send imports their conftest, and Ray puts the root, which has another, before all paths.
            sys.path.insert(0, str(TESTS))
            super().__init__(*given)

        async def reload(self, loading: Loading) -> None:
            """End the engine; the next is loaded by the first who needs it, and knows nothing of this one."""
            await self.close()
            self._loading, self._incarnation = loading, secrets.token_hex(8)

    with cluster(shared) as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=secrets.token_hex(4))
        options = {"num_cpus": 0, "max_concurrency": 1 << 10}
        named = [f"engine {number}" for number in range(_ENGINES)]
        every: list[Any] = []
        free: list[Any] = []

        def pair() -> dict[str, Any]:
            """Actors that serve nobody now."""
            if not free:
                loading = Loading("embedded", 1, {})
                made = {name: ray.remote(ReloadingActor).options(**options).remote(name, loading) for name in named}
                every.append(made)
                free.append(made)
            return free.pop()

        def load(model: Any = "embedded", **options: Any) -> Engine:
            own = {name: options.pop(name) for name in FRONTS if name in options}
            own |= {name: options[name] for name in ("adapter", "chat") if name in options}
            path = model.name if isinstance(model, LoadedModel) else model
            if isinstance(model, LoadedModel) and model.chat != chats(path):
                pytest.skip("a model that was changed once it was loaded cannot be sent")
            if isinstance(model, LoadedModel):
                options.setdefault("dtype", model.adapter.geometry.dtype)
            if options.get("adapter") is not None:
                options["adapter"] = absolute(options["adapter"])
            there = pair()
            try:
                ray.get([actor.reload.remote(Loading(str(path), 1, options)) for actor in there.values()])
                far = [RayEngineClient(name, actor) for name, actor in there.items()]
                router = remote_engine(far, path, made=RayRouter, **own)
            except BaseException:
                free.append(there)
                raise
            router.free, router.pair = free, there
            return router

        try:
            yield load
        finally:
            for made in every:
                for actor in made.values():
                    ray.kill(actor)
            ray.shutdown()
