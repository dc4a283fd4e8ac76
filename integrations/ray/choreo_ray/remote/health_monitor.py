"""Which engines are there: one that is gone is asked to come back, and what it had is forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any

from choreo_agents.errors import ChoreoError, EngineLostError, EngineMismatchError
from choreo_agents.tracing import EngineDown, EngineUp, EventSink, guarded
from choreo_ray.remote.fleet import Fleet, Replica
from choreo_ray.remote.protocol import Hello, Releasing, SentAdapter

LOG = logging.getLogger(__name__)

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
"""Seconds after which an engine that is gone is asked whether it is back: at first, and at last."""


class HealthMonitor:
    """Used on the router's event loop.

    Args:
        fleet: The engines.
        greeting: Of the router.
        lock: Guards the fleet.
        sink: Receives events.
        patience_s: Seconds that calls wait while no engine is there.
        adapters: What engines are given when they come; it is kept up to date.
    """

    def __init__(
        self,
        fleet: Fleet,
        greeting: Hello,
        lock: AbstractContextManager[None],
        sink: EventSink,
        patience_s: float,
        adapters: list[SentAdapter],
    ) -> None:
        self._fleet, self._greeting, self._lock = fleet, greeting, lock
        self._emit, self.patience_s = guarded(sink), patience_s
        self._adapters = adapters
        self._there = asyncio.Event()
        """Set while there is an engine to send calls to."""
        self.spawn: Callable[[Coroutine[Any, Any, Any]], None]
        """Begins something that nobody waits for."""
        self.needed: Callable[[str], bool]
        """Whether the router needs a message, by its id. Under the lock."""
        self.next_sequence_no: Callable[[], int]
        """Counts what the router sends."""

    async def greet_all(self) -> int:
        """Be known to all engines; tokens of KV that each of them has room for at least."""
        replicas = list(self._fleet.replicas.values())
        await asyncio.gather(*(self._greet(replica) for replica in replicas))
        return min(replica.total_tokens for replica in replicas)

    async def greet_again(self) -> None:
        """Be known to them anew: who does not answer now is asked again later. Raises if nobody does."""
        replicas = list(self._fleet.replicas.values())
        found = await asyncio.gather(*(self._greet(replica) for replica in replicas), return_exceptions=True)
        missing = [(each, error) for each, error in zip(replicas, found, strict=True) if error is not None]
        for replica, _ in missing:
            self.spawn(self._revive(replica))
        if len(missing) == len(replicas):
            raise missing[0][1]

    async def awaited(self) -> None:
        """Return when there is an engine; raises `EngineLostError` if there is none for too long."""
        try:
            await asyncio.wait_for(self._there.wait(), self.patience_s)
        except TimeoutError:
            names = ", ".join(map(repr, self._fleet.replicas))
            raise EngineLostError(
                f"none of the engines {names} has answered for {self.patience_s:g} s: see why they end, and call again"
            ) from None

    async def load_adapter(self, name: str, files: Mapping[str, bytes], salt: str) -> None:
        """Have all engines load an adapter; who is gone gets it when it comes back. Raises what one of them does."""
        adapter = SentAdapter(self._greeting.router, salt, name, files)
        if adapter in self._adapters:
            return
        self._adapters.append(adapter)
        with self._lock:
            there = [(each, each.epoch) for each in self._fleet.alive()]
            for replica, _ in there:
                replica.salts.add(salt)
        try:
            for replica, epoch in there:
                try:
                    await replica.engine.load_adapter(adapter)
                except EngineLostError as cause:
                    self.gone(replica, cause, epoch)
        except BaseException:
            self._adapters.remove(adapter)
            raise

    def close_tenant(self, tenant: str, salt: str) -> list[Replica]:
        """The router serves a tenant no longer: the engines that are to be told. Under the lock."""
        self._adapters[:] = [each for each in self._adapters if each.salt != salt]
        return self._fleet.close_tenant(tenant, salt)

    def tell(self, replica: Replica, work: Coroutine[Any, Any, Any]) -> None:
        """Have an engine told something that it need not know once it is gone, or has forgotten what it is of."""
        self.spawn(self._told(replica, work, replica.epoch))

    def gone(self, replica: Replica, cause: EngineLostError, epoch: int) -> None:
        """An engine is gone: what it had is computed again where it is read, and it is asked to come back.

        Args:
            replica: The engine, as the router sees it.
            cause: What says so, ...
            life: ... and of which of its lives.
        """
        with self._lock:
            if not replica.alive or replica.epoch != epoch:
                return
            self._fleet.lost(replica.name)
            if not self._fleet.alive():
                self._there.clear()
        self._emit(EngineDown(time.perf_counter(), replica.name, str(cause)))
        self.spawn(self._revive(replica))

    async def _greet(self, replica: Replica) -> None:
        greeted, loaded = await replica.engine.greet(self._greeting), list[SentAdapter]()
        while True:
            with self._lock:
                lacking = [each for each in self._adapters if all(each is not other for other in loaded)]
                if not lacking:  # of those that others were given meanwhile, too
                    stale = self._fleet.came(replica.name, greeted, self.needed)
                    replica.salts.update(each.salt for each in loaded)
                    break
            for adapter in lacking:
                await replica.engine.load_adapter(adapter)
            loaded += lacking
        for salt, ids in stale.items():
            releasing = Releasing(self._greeting.router, self.next_sequence_no(), salt, tuple(ids))
            self.tell(replica, replica.engine.release(releasing))
        self._emit(EngineUp(time.perf_counter(), replica.name))
        self._there.set()

    async def _revive(self, replica: Replica) -> None:
        wait_s = _BACKOFF_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)
            try:
                await self._greet(replica)
                return
            except EngineMismatchError as error:
                LOG.warning("an engine that was gone is another now, and is sent nothing: %s", error)
                return
            except EngineLostError:
                continue
            except Exception:
                LOG.warning("engine %r does not begin again, and is asked later:", replica.name, exc_info=True)

    async def _told(self, replica: Replica, work: Coroutine[Any, Any, Any], epoch: int) -> None:
        try:
            await work
        except EngineLostError as cause:
            self.gone(replica, cause, epoch)
        except ChoreoError:
            pass
