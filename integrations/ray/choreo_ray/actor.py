"""An engine in a Ray actor, which computes for routers in other processes."""

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
"""Seconds until a router has to call `listen` again; and seconds without it after which the router counts as gone."""


@dataclass(frozen=True)
class Loading:
    """Arguments with which an actor loads its engine."""

    model: str
    """A directory, a hub name, or `"embedded"`."""
    threads: int
    """Threads that torch uses on a CPU."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `Engine.load`."""

    def __post_init__(self) -> None:
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise InvalidRequestError(f"threads must be an integer of at least 1, not {self.threads!r}")


@dataclass(frozen=True)
class Sender:
    """A router, and the incarnation of the actor that it has greeted."""

    router: str
    incarnation: str


@dataclass(frozen=True)
class SomeTokens:
    """New tokens of one call."""

    since: int
    """Number of the call's tokens that were sent before."""
    tokens: Sequence[SampledToken] = ()
    """Empty: the call has begun."""


class EngineActor:
    """An engine in a process of its own. Methods that take a `Sender` serve only routers that it has greeted.

    A process that Ray has restarted knows nothing of before. Each process has an `incarnation`, which a router gets
    when it greets and sends with every call. A router that stops listening is gone, and what is held for it is
    released.

    Args:
        name: Name of the engine.
        loading: Arguments of the engine, which is loaded when first needed, also after a restart.
    """

    def __init__(self, name: str, loading: Loading) -> None:
        self._name, self._loading = name, loading
        self._incarnation = secrets.token_hex(8)
        self._engine: Engine | None = None
        self._server: EngineWorker | None = None
        self._lock = asyncio.Lock()
        """Held while the engine is loaded or closed."""
        self._routers: dict[str, _Router] = {}

    async def there(self) -> int:
        """Return the process id, once the process has begun."""
        return os.getpid()

    async def load(self) -> None:
        """Load the engine unless it is loaded. Raises what `Engine.load` does."""
        async with self._lock:
            if self._server is None:
                self._engine = await asyncio.to_thread(_load, self._loading)
                self._server = EngineWorker(self._engine, self._name)

    async def meet(self, version: str) -> tuple[str, torch.dtype | None]:
        """Return the model's name and dtype, as far as they are known: nothing is loaded for it.

        Args:
            version: Version of this package at the router. Raises `EngineMismatchError` if it differs from the one
                here.
        """
        if version != (own := own_version()):
            raise EngineMismatchError(
                f"engine {self._name!r} runs {own}, but its router {version}: install the same version on all machines"
            )
        if self._engine is None:
            return self._loading.model, self._loading.options.get("dtype")
        return self._loading.model, self._engine.model.adapter.geometry.dtype

    async def greet(self, greeting: Hello) -> tuple[str, HelloReply]:
        """Greet a router (see `EngineClient`); return the incarnation, too."""
        await self.load()
        assert self._server is not None
        reply = await self._server.greet(greeting)
        if (router := self._routers.get(greeting.router)) is not None:
            router.cancel()  # the router took the engine for lost, and runs these calls elsewhere
        else:
            self._routers[greeting.router] = _Router()
            self._expect(greeting.router)
        return self._incarnation, reply

    async def listen(self, sender: Sender) -> AsyncGenerator[Mapping[int, SomeTokens]]:
        """Yield new tokens of all calls of a router, by sequence number; those that are ready together are one item.

        An item costs about as much as a call, whatever its size. The stream ends after `LISTEN_S`, and routers that are
        still there call again.
        """
        _, router = self._require_known(sender)
        router.listens += 1
        until = asyncio.get_running_loop().time() + LISTEN_S
        try:
            while tokens := await router.take(until):
                yield tokens
        finally:
            self._expect(sender.router)

    async def load_adapter(self, sender: Sender, adapter: SentAdapter) -> None:
        """See `EngineClient` for this method and those that follow."""
        server, _ = self._require_known(sender, adapter.salt)
        await server.load_adapter(adapter)

    async def run(self, sender: Sender, sent: SentCall) -> tuple[tuple[SampledToken, ...], SentAnswer | ChoreoError]:
        """Return all tokens, those that `listen` has yielded included, and the answer or the error that ended the
        call.
        """
        server, router = self._require_known(sender, sent.salt)
        tokens: list[SampledToken] = []
        # An item of its own is costly: most calls have sampled or ended before the timer fires.
        timer = asyncio.get_running_loop().call_later(_BEGUN_S, router.queue, sent.sequence_no, 0, ())
        router.calls.add(call := asyncio.current_task())
        try:
            async with aclosing(server.run(sent)) as parts:
                async for part in parts:
                    if isinstance(part, SentAnswer):
                        return tuple(tokens), part
                    if part:
                        timer.cancel()
                        router.queue(sent.sequence_no, len(tokens), part)
                        tokens += part
        except ChoreoError as error:
            if isinstance(error, DeviceLostError) or server.has_ended:
                raise self._restart(error) from error
            if not tokens:
                raise
            return tuple(tokens), error
        finally:
            timer.cancel()
            router.calls.discard(call)
        raise EngineLostError(f"engine {self._name!r} ended a call without an answer")

    async def raise_priority(self, sender: Sender, number: int, priority: int) -> None:
        server, _ = self._require_known(sender)
        await server.raise_priority(sender.router, number, priority)

    async def export_kv(self, sender: Sender, copying: Copying) -> list[Any]:
        """Return a reference to the KV in this machine's object store, in a list; an empty list if there is no KV."""
        server, _ = self._require_known(sender, copying.salt)
        packets = await server.export_kv(copying)
        if not packets:
            return []
        try:
            return [await asyncio.to_thread(ray.put, packets)]
        except (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError) as full:
            LOG.warning("the object store is full, so KV is recomputed by its reader: %s", full)
            return []

    async def import_kv(self, sender: Sender, copying: Copying, exported: Sequence[Any]) -> tuple[Collection[str], int]:
        server, _ = self._require_known(sender, copying.salt)
        packets: Sequence[Any] = ()
        for reference in exported:
            try:
                packets = await reference
            except ray_errors.RayError as lost:  # the exporting engine is gone, not this one
                LOG.warning("KV was lost in transit, so it is recomputed by its reader: %s", lost)
        return await server.import_kv(copying, packets)

    async def release(self, sender: Sender, gathered: Sequence[Releasing]) -> None:
        """Release messages for several requests of the router, in order."""
        server, _ = self._require_known(sender)
        for releasing in gathered:
            await server.release(releasing)

    async def close_tenant(self, sender: Sender, salt: str, sequence_no: int) -> None:
        server, router = self._require_known(sender)
        await server.close_tenant(sender.router, salt, sequence_no)
        if not server.serves(sender.router, salt):
            router.salts.discard(salt)

    async def stats(self) -> EngineStats:
        """Return the statistics of the engine."""
        await self.load()
        assert self._engine is not None and self._engine.admin is not None
        return self._engine.admin.stats()

    async def close(self) -> None:
        """Write what is to persist, and close the engine."""
        async with self._lock:
            engine, self._engine, self._server = self._engine, None, None
            self._routers.clear()
            if engine is not None:
                await asyncio.to_thread(engine.close)

    def _require_known(self, sender: Sender, salt: str | None = None) -> tuple[EngineWorker, _Router]:
        router = self._routers.get(sender.router)
        if sender.incarnation != self._incarnation or self._server is None or router is None:
            raise EngineLostError(f"engine {self._name!r} was restarted, or dropped its router: its earlier KV is lost")
        if salt is not None:
            router.salts.add(salt)
        return self._server, router

    def _expect(self, name: str) -> None:
        """Drop a router unless it listens again within `GONE_S`."""
        if (router := self._routers.get(name)) is not None:
            listens, loop = router.listens, asyncio.get_running_loop()
            loop.call_later(GONE_S, lambda: loop.create_task(self._give_up(name, router, listens)))

    async def _give_up(self, name: str, router: _Router, listens: int) -> None:
        if self._routers.get(name) is router and router.listens == listens and self._server is not None:
            LOG.info("a router has gone: engine %r releases what it held for it", self._name)
            del self._routers[name]
            router.cancel()
            for salt in tuple(router.salts):
                await self._server.close_tenant(name, salt, sys.maxsize)

    def _restart(self, lost: ChoreoError) -> EngineLostError:
        """End the process, which Ray restarts since its engine computes no more; return the error for callers."""
        asyncio.get_running_loop().call_later(_SOON_S, os._exit, 1)
        return EngineLostError(f"engine {self._name!r} has ended: {lost}")


_BEGUN_S = 0.02
"""Seconds after which a router hears that a call has begun, unless it got tokens before."""
_SOON_S = 0.2
"""Seconds for sending the error to callers before the process ends."""


class _Router:
    """A router with its calls, and the tokens that it has not fetched yet."""

    def __init__(self) -> None:
        self.salts: set[str] = set()
        """Salts of its tenants."""
        self.calls: set[asyncio.Task[Any] | None] = set()
        """Tasks of the calls under way."""
        self.listens = 0
        """Number of its calls of `listen`."""
        self._waiting: dict[int, SomeTokens] = {}
        self._has_tokens = asyncio.Event()

    def cancel(self) -> None:
        """Cancel its calls."""
        for call in self.calls:
            if call is not None:
                call.cancel()

    def queue(self, sequence_no: int, since: int, tokens: Sequence[SampledToken]) -> None:
        """Queue tokens of a call, of which `since` were sent before."""
        before = self._waiting.get(sequence_no, SomeTokens(since))
        self._waiting[sequence_no] = SomeTokens(before.since, (*before.tokens, *tokens))
        self._has_tokens.set()

    async def take(self, until: float) -> Mapping[int, SomeTokens]:
        """Return all queued tokens, once there are any; none if there are none by `until`, a time of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._waiting and until > loop.time():
            timer = loop.call_at(until, self._has_tokens.set)
            await self._has_tokens.wait()
            timer.cancel()
        self._has_tokens.clear()
        waiting, self._waiting = self._waiting, {}
        return waiting


def _load(loading: Loading) -> Engine:
    torch.set_num_threads(loading.threads)
    return Engine.load(loading.model, **loading.options)
