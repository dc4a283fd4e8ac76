"""What runs in each actor: an engine, and what has it compute for fronts elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import exceptions as ray_errors

from choreo_agents import Engine
from choreo_agents.engine.elsewhere import (
    Copying,
    EngineServer,
    Greeted,
    Greeting,
    JoiningMessage,
    SentAnswer,
    SentCall,
)
from choreo_agents.errors import EngineLostError
from choreo_agents.sampling import Chosen

LOG = logging.getLogger("choreo_ray")


@dataclass(frozen=True)
class Loading:
    """What an actor loads."""

    model: str
    """A folder, a hub name, or `"embedded"`."""
    threads: int
    """That torch computes with on a CPU."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The other arguments of `Engine.load`."""


class EngineActor:
    """One engine in a process of its own. Every method but `load` and `greet` is for fronts that it has greeted.

    A process that Ray has started again knows nothing of before: each has an `incarnation`, which a front is told when
    it greets, and which comes with all that it sends.

    Args:
        name: The engine's.
        loading: What is loaded by the first who needs it, also after a restart.
    """

    def __init__(self, name: str, loading: Loading) -> None:
        self._name, self._loading = name, loading
        self._incarnation = secrets.token_hex(8)
        self._engine: Engine | None = None
        self._server: EngineServer | None = None
        self._turn = asyncio.Lock()
        """Of who loads."""

    async def there(self) -> int:
        """The process, once it has begun."""
        return os.getpid()

    async def load(self) -> None:
        """Load the engine unless it is there. Raises what `Engine.load` does."""
        async with self._turn:
            if self._server is None:
                self._engine = await asyncio.to_thread(_loaded, self._loading)
                assert self._engine.owner is not None, "it was loaded, and is no tenant's"
                self._server = self._engine.owner.server(self._name)

    async def greet(self, greeting: Greeting) -> tuple[str, Greeted]:
        """See `FarEngine`; with the incarnation."""
        await self.load()
        assert self._server is not None
        return self._incarnation, await self._server.greet(greeting)

    async def run(self, incarnation: str, sent: SentCall) -> AsyncGenerator[Sequence[Chosen] | SentAnswer]:
        """See `FarEngine`, as all that follow."""
        async with aclosing(self._known(incarnation).run(sent)) as told:
            async for each in told:
                yield each

    async def hurry(self, incarnation: str, front: str, number: int, priority: int) -> None:
        await self._known(incarnation).hurry(front, number, priority)

    async def join(self, incarnation: str, joining: JoiningMessage) -> None:
        await self._known(incarnation).join(joining)

    async def give(self, incarnation: str, copying: Copying) -> list[Any]:
        """A reference to the KV, which stays in the object store of this machine until it is taken."""
        parcels = await self._known(incarnation).give(copying)
        if not parcels:
            return []
        try:
            return [await asyncio.to_thread(ray.put, parcels)]
        except (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError) as full:
            LOG.warning("KV is computed again where it is read: the object store has no room for it: %s", full)
            return []

    async def take(self, incarnation: str, copying: Copying, given: Sequence[Any]) -> tuple[Collection[str], int]:
        server = self._known(incarnation)
        parcels: Sequence[Any] = ()
        for reference in given:
            try:
                parcels = await reference
            except ray_errors.RayError as lost:  # who gave it is gone, not who takes it
                LOG.warning("KV is computed again where it is read: it was lost on its way: %s", lost)
        return await server.take(copying, parcels)

    async def release(self, incarnation: str, front: str, salt: str, ids: Collection[str]) -> None:
        await self._known(incarnation).release(front, salt, ids)

    async def close_tenant(self, incarnation: str, front: str, salt: str) -> None:
        await self._known(incarnation).close_tenant(front, salt)

    async def close(self) -> None:
        """Write what is to be kept, and end the engine."""
        async with self._turn:
            engine, self._engine, self._server = self._engine, None, None
            if engine is not None:
                await asyncio.to_thread(engine.close)

    def _known(self, incarnation: str) -> EngineServer:
        if incarnation != self._incarnation or self._server is None:
            raise EngineLostError(f"engine {self._name!r} was gone, and is back without what it had")
        return self._server


def _loaded(loading: Loading) -> Engine:
    torch.set_num_threads(loading.threads)
    return Engine.load(loading.model, **loading.options)
