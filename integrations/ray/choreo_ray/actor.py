"""What runs in each actor: an engine, and what has it compute for routers elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import exceptions as ray_errors

from choreo_agents import Engine, EngineStats
from choreo_agents.errors import ChoreoError, DeviceLostError, EngineLostError, EngineMismatchError, InvalidRequestError
from choreo_agents.sampling import SampledToken
from choreo_ray.remote import (
    Copying,
    EngineWorker,
    Hello,
    HelloReply,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
)
from choreo_ray.remote.protocol import own_version

LOG = logging.getLogger("choreo_ray")

LISTEN_S, GONE_S = 20.0, 60.0
"""Seconds after which a router has to ask again for what is said; and how long after that it counts as gone."""


@dataclass(frozen=True)
class Loading:
    """What an actor loads."""

    model: str
    """A folder, a hub name, or `"embedded"`."""
    threads: int
    """That torch computes with on a CPU."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The other arguments of `Engine.load`."""

    def __post_init__(self) -> None:
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise InvalidRequestError(f"threads must be a whole number, at least 1, not {self.threads!r}")


@dataclass(frozen=True)
class Sender:
    """Who calls, and whom it takes the engine for."""

    router: str
    incarnation: str


@dataclass(frozen=True)
class SomeTokens:
    """Of a call."""

    since: int
    """How many of its tokens were told before."""
    tokens: Sequence[SampledToken] = ()
    """None: it has begun."""


class EngineActor:
    """One engine in a process of its own. What takes a `Sender` is for routers that it has greeted.

    A process that Ray has started again knows nothing of before: each has an `incarnation`, which a router is told when
    it greets, and which comes with all that it sends. A router that listens no longer is gone, and what it had with it.

    Args:
        name: The engine's.
        loading: What is loaded by the first who needs it, also after a restart.
    """

    def __init__(self, name: str, loading: Loading) -> None:
        self._name, self._loading = name, loading
        self._incarnation = secrets.token_hex(8)
        self._engine: Engine | None = None
        self._server: EngineWorker | None = None
        self._turn = asyncio.Lock()
        """Of who loads."""
        self._routers: dict[str, _Router] = {}

    async def there(self) -> int:
        """The process, once it has begun."""
        return os.getpid()

    async def load(self) -> None:
        """Load the engine unless it is there. Raises what `Engine.load` does."""
        async with self._turn:
            if self._server is None:
                self._engine = await asyncio.to_thread(_loaded, self._loading)
                assert self._engine.admin is not None, "it was loaded, and is no tenant's"
                self._server = EngineWorker(self._engine.admin, self._name)

    async def meet(self, version: str) -> tuple[str, torch.dtype | None]:
        """The model's name, and what it is in, as far as that is known: nothing is loaded for it.

        Args:
            version: Of this package where the router is. Raises `EngineMismatchError` if it is another one here.
        """
        if version != (own := own_version()):
            raise EngineMismatchError(
                f"engine {self._name!r} runs {own}, and its router {version}: install one version on all machines"
            )
        if self._engine is None:
            return self._loading.model, self._loading.options.get("dtype")
        return self._loading.model, self._engine.model.adapter.geometry.dtype

    async def greet(self, greeting: Hello) -> tuple[str, HelloReply]:
        """See `EngineClient`; with the incarnation."""
        await self.load()
        assert self._server is not None
        greeted = await self._server.greet(greeting)
        if (known := self._routers.get(greeting.router)) is not None:
            known.cancel()  # it took the engine for lost, and has these calls run elsewhere
        else:
            self._routers[greeting.router] = _Router()
            self._expect(greeting.router)
        return self._incarnation, greeted

    async def listen(self, sender: Sender) -> AsyncGenerator[Mapping[int, SomeTokens]]:
        """Tokens of all calls of a router as they come, by sequence number; those that are there at once are one item.

        An item costs about as much as a call, however much is in it. The stream ends after a while, and is asked for
        again by routers that are still there.
        """
        _, router = self._known(sender)
        router.heard += 1
        until = asyncio.get_running_loop().time() + LISTEN_S
        try:
            while told := await router.said(until):
                yield told
        finally:
            self._expect(sender.router)

    async def load_adapter(self, sender: Sender, adapter: SentAdapter) -> None:
        """See `EngineClient`, as all that follow."""
        server, _ = self._known(sender, adapter.salt)
        await server.load_adapter(adapter)

    async def run(self, sender: Sender, sent: SentCall) -> tuple[tuple[SampledToken, ...], SentAnswer | ChoreoError]:
        """All tokens, of which some were heard before, and what was made, or why nothing was."""
        server, router = self._known(sender, sent.salt)
        told: list[SampledToken] = []
        # An item of its own is dear: most calls have said or ended before.
        begun = asyncio.get_running_loop().call_later(_BEGUN_S, router.say, sent.sequence_no, 0, ())
        router.calls.add(call := asyncio.current_task())
        try:
            async with aclosing(server.run(sent)) as telling:
                async for each in telling:
                    if isinstance(each, SentAnswer):
                        return tuple(told), each
                    if each:
                        begun.cancel()
                        router.say(sent.sequence_no, len(told), each)
                        told += each
        except ChoreoError as error:
            if isinstance(error, DeviceLostError) or server.has_ended:
                raise self._over(error) from error
            if not told:
                raise
            return tuple(told), error
        finally:
            begun.cancel()
            router.calls.discard(call)
        raise EngineLostError(f"engine {self._name!r} has ended a call without an answer")

    async def raise_priority(self, sender: Sender, number: int, priority: int) -> None:
        server, _ = self._known(sender)
        await server.raise_priority(sender.router, number, priority)

    async def export_kv(self, sender: Sender, copying: Copying) -> list[Any]:
        """A reference to the KV, which stays in the object store of this machine until it is taken."""
        server, _ = self._known(sender, copying.salt)
        parcels = await server.export_kv(copying)
        if not parcels:
            return []
        try:
            return [await asyncio.to_thread(ray.put, parcels)]
        except (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError) as full:
            LOG.warning("KV is computed again where it is read: the object store has no room for it: %s", full)
            return []

    async def import_kv(self, sender: Sender, copying: Copying, given: Sequence[Any]) -> tuple[Collection[str], int]:
        server, _ = self._known(sender, copying.salt)
        parcels: Sequence[Any] = ()
        for reference in given:
            try:
                parcels = await reference
            except ray_errors.RayError as lost:  # who gave it is gone, not who takes it
                LOG.warning("KV is computed again where it is read: it was lost on its way: %s", lost)
        return await server.import_kv(copying, parcels)

    async def release(self, sender: Sender, gathered: Sequence[Releasing]) -> None:
        """Several at once."""
        server, _ = self._known(sender)
        for releasing in gathered:
            await server.release(releasing)

    async def close_tenant(self, sender: Sender, salt: str, sequence_no: int) -> None:
        server, router = self._known(sender)
        await server.close_tenant(sender.router, salt, sequence_no)
        if not server.serves(sender.router, salt):
            router.salts.discard(salt)

    async def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        await self.load()
        assert self._engine is not None and self._engine.admin is not None
        return self._engine.admin.stats()

    async def close(self) -> None:
        """Write what is to be kept, and end the engine."""
        async with self._turn:
            engine, self._engine, self._server = self._engine, None, None
            self._routers.clear()
            if engine is not None:
                await asyncio.to_thread(engine.close)

    def _known(self, sender: Sender, salt: str | None = None) -> tuple[EngineWorker, _Router]:
        router = self._routers.get(sender.router)
        if sender.incarnation != self._incarnation or self._server is None or router is None:
            raise EngineLostError(
                f"engine {self._name!r} was gone, or thought so of its router: it has nothing of before"
            )
        if salt is not None:
            router.salts.add(salt)
        return self._server, router

    def _expect(self, name: str) -> None:
        """Give up a router unless it listens before long."""
        if (router := self._routers.get(name)) is not None:
            heard, loop = router.heard, asyncio.get_running_loop()
            loop.call_later(GONE_S, lambda: loop.create_task(self._give_up(name, router, heard)))

    async def _give_up(self, name: str, router: _Router, heard: int) -> None:
        if self._routers.get(name) is router and router.heard == heard and self._server is not None:
            LOG.info("a router is gone: what engine %r has for it goes, too", self._name)
            del self._routers[name]
            router.cancel()
            for salt in tuple(router.salts):
                await self._server.close_tenant(name, salt, sys.maxsize)

    def _over(self, lost: ChoreoError) -> EngineLostError:
        """End the process, which Ray starts again: its engine computes no more."""
        asyncio.get_running_loop().call_later(_SOON_S, os._exit, 1)
        return EngineLostError(f"engine {self._name!r} has ended: {lost}")


_BEGUN_S = 0.02
"""Seconds after which a router is told that a call has begun, unless it was told more."""
_SOON_S = 0.2
"""Seconds in which calls are told why an engine ends."""


class _Router:
    """A router, and what was said to it and not heard yet."""

    def __init__(self) -> None:
        self.salts: set[str] = set()
        """Of its tenants."""
        self.calls: set[asyncio.Task[Any] | None] = set()
        """Under way."""
        self.heard = 0
        """How often it has asked for what is said."""
        self._waiting: dict[int, SomeTokens] = {}
        self._some = asyncio.Event()

    def cancel(self) -> None:
        """End its calls."""
        for call in self.calls:
            if call is not None:
                call.cancel()

    def say(self, sequence_no: int, since: int, told: Sequence[SampledToken]) -> None:
        """Tokens of a call as it was sent once, after those that were told before."""
        before = self._waiting.get(sequence_no, SomeTokens(since))
        self._waiting[sequence_no] = SomeTokens(before.since, (*before.tokens, *told))
        self._some.set()

    async def said(self, until: float) -> Mapping[int, SomeTokens]:
        """All that there is, once there is something; nothing if that is not before a time of the event loop's."""
        loop = asyncio.get_running_loop()
        if not self._waiting and until > loop.time():
            timer = loop.call_at(until, self._some.set)
            await self._some.wait()
            timer.cancel()
        self._some.clear()
        waiting, self._waiting = self._waiting, {}
        return waiting


def _loaded(loading: Loading) -> Engine:
    torch.set_num_threads(loading.threads)
    return Engine.load(loading.model, **loading.options)
