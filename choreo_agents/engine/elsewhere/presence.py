"""Which engines are there: one that is gone is asked to come back, and what it had is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from choreo_agents.engine.elsewhere.fleet import Fleet, Outpost
from choreo_agents.engine.elsewhere.registering import Registering
from choreo_agents.engine.elsewhere.sending import Greeting, SentAdapter
from choreo_agents.errors import EngineLostError, EngineMismatchError
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.tracing import EngineCame, EngineWent, EventSink, guarded

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
"""Seconds after which an engine that is gone is asked whether it is back: at first, and at last."""


class Presence:
    """Used on the front's event loop.

    Args:
        fleet: The engines.
        greeting: Of the front.
        lock: Guards the fleet.
        sink: Receives events.
        patience_s: Seconds that calls wait while no engine is there.
        register: Where engines that are gone are reported.
    """

    def __init__(
        self,
        fleet: Fleet,
        greeting: Greeting,
        lock: EngineLock,
        sink: EventSink,
        patience_s: float,
        register: Registering | None,
    ) -> None:
        self._fleet, self._greeting, self._lock = fleet, greeting, lock
        self._emit, self.patience_s, self._register = guarded(sink), patience_s, register
        self._adapters: list[SentAdapter] = []
        """What engines are given when they come."""
        self._there = asyncio.Event()
        """Set while there is an engine to send calls to."""
        self.spawn: Callable[[Coroutine[Any, Any, Any]], None]
        """Begins something that nobody waits for."""

    async def greet_all(self) -> int:
        """Be known to all engines; tokens of KV that each of them has room for at least."""
        outposts = list(self._fleet.outposts.values())
        await asyncio.gather(*(self._greet(outpost) for outpost in outposts))
        return min(outpost.total_tokens for outpost in outposts)

    async def awaited(self) -> None:
        """Return when there is an engine; raises `EngineLostError` if there is none for too long."""
        try:
            await asyncio.wait_for(self._there.wait(), self.patience_s)
        except TimeoutError:
            names = ", ".join(map(repr, self._fleet.outposts))
            raise EngineLostError(
                f"none of the engines {names} has answered for {self.patience_s:g} s: see why they end, and call again"
            ) from None

    async def load_adapter(self, name: str, files: Mapping[str, bytes], salt: str) -> None:
        """Have all engines load an adapter; who is gone gets it when it comes back."""
        adapter = SentAdapter(self._greeting.front, salt, name, files)
        self._adapters.append(adapter)
        with self._lock:
            there = self._fleet.alive()
        for outpost in there:
            try:
                await outpost.engine.load_adapter(adapter)
            except EngineLostError as cause:
                self.gone(outpost, cause)

    def gone(self, outpost: Outpost, cause: EngineLostError) -> None:
        """An engine is gone: what it had is computed again where it is read, and it is asked to come back."""
        with self._lock:
            if not outpost.alive:
                return
            self._fleet.lost(outpost.name)
            if not self._fleet.alive():
                self._there.clear()
        self._emit(EngineWent(time.perf_counter(), outpost.name, str(cause)))
        if self._register is not None:
            self.spawn(self._register.lost(outpost.name))
        self.spawn(self._revive(outpost))

    async def _greet(self, outpost: Outpost) -> None:
        greeted = await outpost.engine.greet(self._greeting)
        for adapter in list(self._adapters):
            await outpost.engine.load_adapter(adapter)
        with self._lock:
            self._fleet.came(outpost.name, greeted)
        self._emit(EngineCame(time.perf_counter(), outpost.name))
        self._there.set()

    async def _revive(self, outpost: Outpost) -> None:
        wait_s = _BACKOFF_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)
            try:
                await self._greet(outpost)
                return
            except EngineLostError:
                continue
            except EngineMismatchError:
                return  # it is another now: nothing can be sent to it
