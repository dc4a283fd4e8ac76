"""Remote engines in this process: routers over them, and engines that can be held up or killed."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from choreo_ray.remote import (
    Copying,
    Costs,
    EngineWorker,
    Hello,
    HelloReply,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
    remote_engine,
)
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route, route

from choreo_agents import Engine
from choreo_agents.errors import EngineLostError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import SampledToken

E = TypeVar("E", bound=Engine)
Routing = Callable[[CallToPlace, Sequence[EngineAhead], Costs], Route]
FRONTS = ("seed", "salt", "sink", "copied_bytes", "patience_s", "costs")
_LOADING = ("device", "dtype", "prepacked", "chat", "generation_config")


class Router(Engine):
    """A router in whose process its engines are, too: it is checked and closed with them."""

    far: Sequence[Engine] = ()

    def check(self) -> None:
        super().check()
        for engine in self.far:
            engine.check()

    def close(self) -> None:
        super().close()
        for engine in self.far:
            engine.close()


def routed(router: E, routing: Routing) -> E:
    """The router, all of whose calls run where this says."""
    core: Any = router._core
    core.execution.fleet._route = partial(routing, **core.execution.fleet._route.keywords)
    return router


def load_loopback(
    model: Any = "embedded", engines: int = 2, *, routing: Routing | None = None, **options: Any
) -> Router:
    """What `Engine.load` takes, of each of several engines, and a router over them."""
    own = {name: options.pop(name) for name in FRONTS if name in options}
    loading = {name: options.pop(name) for name in _LOADING if name in options}
    loaded = model if isinstance(model, LoadedModel) else load_model(model, **loading)
    far = [Engine.load(loaded, **options) for _ in range(engines)]
    own |= {name: options[name] for name in ("adapter",) if name in options}
    servers = [LoopbackEngine(EngineWorker(made, f"engine {n}")) for n, made in enumerate(far)]
    router = remote_engine(servers, loaded, made=Router, **own)
    router.far = far
    return router if routing is None else routed(router, routing)


def apart(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """Places calls where least of what they read is, and has all of it copied there that can be."""
    names = [engine.name for engine in engines]
    there = {name: sum(name in read.holders for read in call.reads) for name in names}
    found = route(call, [min(engines, key=lambda engine: (there[engine.name], engine.name))], costs)
    copies = {read.id: min(read.holders) for read in call.reads if read.holders and found.engine not in read.holders}
    nbytes = sum(read.nbytes for read in call.reads if read.id in copies)
    return Route(found.engine, copies, (), nbytes, 0, found.expected_s)


def encoding_apart(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """The same, and has it encoded again there."""
    found = apart(call, engines, costs)
    return Route(found.engine, {}, tuple(found.copies), 0, found.bytes_copied, found.expected_s)


class LoopbackEngine:
    """A `EngineClient` of this process, all that is said to and by which is a copy, as it is on any wire.

    Args:
        server: The engine's.
    """

    def __init__(self, server: EngineWorker) -> None:
        self.name, self._server = server.name, server

    def __getattr__(self, method: str) -> Any:
        asked = getattr(self._server, method)

        async def told(*arguments: Any) -> Any:
            return _copied(await asked(*_copied(arguments)))

        return told

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        async with aclosing(self._server.run(_copied(sent))) as told:
            async for each in told:
                yield _copied(each)


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Gate:
    """Where something that is on its way to an engine, or back, is held up."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def open(self) -> None:
        """Let it go on, and all that follows."""
        self.opened.set()

    async def passed(self) -> None:
        """Return when it is open."""
        self.reached.set()
        while not self.opened.is_set():
            await asyncio.sleep(0.002)


class WiredEngine:
    """An engine of this process, behind a wire on which things can be held up and lost.

    Args:
        name: Its own.
        engine: The engine, which it closes in the end.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        assert engine.admin is not None
        self.name, self.engine = name, engine
        self.server = EngineWorker(engine, name)
        self.gates: dict[str, Gate] = {}
        """By where: `run`, `answer`, `give`, `take`, `taken`, `greeted` or `join`."""
        self.fails: dict[str, Exception] = {}
        """What is raised instead: by where, and `all`."""
        self.passed = Counter[str]()
        """What has come there."""

    def hold(self, where: str) -> Gate:
        """Hold up what comes there from now on."""
        self.gates[where] = Gate()
        return self.gates[where]

    def held(self) -> tuple[int, int, int]:
        """Messages, leases and bytes of KV that the engine has."""
        stats = self.engine.admin.stats()
        return stats.messages, stats.leases, stats.kv_bytes

    def close(self) -> None:
        self.engine.close()

    async def _pass(self, where: str) -> None:
        self.passed[where] += 1
        if (gate := self.gates.get(where)) is not None:
            await gate.passed()
        if (error := self.fails.get(where, self.fails.get("all"))) is not None:
            raise error

    async def greet(self, greeting: Hello) -> HelloReply:
        await self._pass("greet")
        found = await self.server.greet(greeting)
        await self._pass("greeted")
        return found

    async def load_adapter(self, adapter: SentAdapter) -> None:
        await self._pass("load_adapter")
        await self.server.load_adapter(adapter)
        await self._pass("loaded")

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        await self._pass("run")
        async with aclosing(self.server.run(sent)) as told:
            async for each in told:
                if isinstance(each, SentAnswer):
                    await self._pass("answer")
                yield each

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        await self.server.raise_priority(router, number, priority)

    async def export_kv(self, copying: Copying) -> Any:
        await self._pass("give")
        return await self.server.export_kv(copying)

    async def import_kv(self, copying: Copying, exported: Any) -> tuple[Collection[str], int]:
        await self._pass("take")
        found = await self.server.import_kv(copying, exported)
        await self._pass("taken")
        return found

    async def release(self, releasing: Releasing) -> None:
        await self._pass("release")
        await self.server.release(releasing)

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        await self.server.close_tenant(router, salt, sequence_no)


class MortalEngine:
    """An engine elsewhere that can be killed, with all that it has, and come back without.

    Args:
        name: Its own.
        make: Loads an engine; asked once for each of its lives.
    """

    def __init__(self, name: str, make: Callable[[], Engine]) -> None:
        self.name, self._make = name, make
        self.lives = 0
        self.fails_to_load: Exception | None = None
        self.on_token: Callable[[int], None] = lambda token: None
        """Told how many tokens the calls of this life have sent, on the router's thread."""
        self.calls: list[SentCall] = []
        """All that it was sent, in all of its lives."""
        self._sent = 0
        self._greeted: set[str] = set()
        self._engine: Engine | None = None
        self.revive()

    def revive(self) -> None:
        """Begin a new life."""
        self._engine, self._greeted, self._deaths = self._make(), set(), list[asyncio.Event]()
        self._server: EngineWorker = EngineWorker(self._engine, self.name)
        self.lives += 1
        self._sent = 0

    def kill(self) -> None:
        """End this one. On the router's thread, if calls are under way."""
        engine, self._engine = self._engine, None
        for dead in self._deaths:
            dead.set()
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """End it for good."""
        self.kill()

    def _alive(self, router: str | None = None) -> EngineWorker:
        if self._engine is None or (router is not None and router not in self._greeted):
            raise EngineLostError(f"engine {self.name!r} is gone")
        return self._server

    async def greet(self, greeting: Hello) -> HelloReply:
        found = await self._alive().greet(greeting)
        self._greeted.add(greeting.router)
        return found

    async def load_adapter(self, adapter: SentAdapter) -> None:
        if self.fails_to_load is not None:
            raise self.fails_to_load
        await self._alive(adapter.router).load_adapter(adapter)

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        server, dead, told = self._alive(sent.router), asyncio.Event(), self._alive(sent.router).run(sent)
        self.calls.append(sent)
        self._deaths.append(dead)
        while True:
            coming, gone = asyncio.ensure_future(anext(told, None)), asyncio.ensure_future(dead.wait())
            await asyncio.wait([coming, gone], return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if dead.is_set():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                raise EngineLostError(f"engine {server.name!r} is gone")
            if (each := coming.result()) is None:
                return
            yield each
            if not isinstance(each, SentAnswer):
                self._sent += len(each)
                self.on_token(self._sent)

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        await self._alive(router).raise_priority(router, number, priority)

    async def export_kv(self, copying: Copying) -> Any:
        return await self._alive(copying.router).export_kv(copying)

    async def import_kv(self, copying: Copying, exported: Any) -> tuple[Collection[str], int]:
        return await self._alive(copying.router).import_kv(copying, exported)

    async def release(self, releasing: Releasing) -> None:
        await self._alive(releasing.router).release(releasing)

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        await self._alive(router).close_tenant(router, salt, sequence_no)
