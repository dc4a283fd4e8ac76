"""Monitors replicas: reconnects lost ones with backoff, forgets what they had, and tells others what to release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from choreo_agents.errors import ChoreoError, EngineLostError, EngineMismatchError
from choreo_agents.tracing import EngineDown, EngineUp
from choreo_ray.remote.context import RouterContext
from choreo_ray.remote.fleet import Replica
from choreo_ray.remote.protocol import Hello, Releasing, SentAdapter

LOG = logging.getLogger(__name__)

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
"""Seconds until an engine that is gone is greeted again: at first, and at most."""
PROBE_S = 5.0
"""Seconds within which one of the engines has to answer a readiness probe."""


class HealthMonitor:
    """Monitor of the engines that are up or gone. Used on the router's event loop; what sends them something that
    nobody waits for, under the lock.

    Args:
        context: The router's.
        greeting: Greeting of the router.
        patience_s: Seconds that calls wait while no engine is up.
        adapters: Adapters that engines load when they come up; kept up to date here.
    """

    def __init__(self, context: RouterContext, greeting: Hello, patience_s: float, adapters: list[SentAdapter]) -> None:
        self._context, self._fleet, self._lock = context, context.fleet, context.lock
        self._greeting, self.patience_s, self._adapters = greeting, patience_s, adapters
        self._is_any_alive = asyncio.Event()
        """Set while there is an engine to send calls to."""

    async def greet_all(self, *, again: bool) -> None:
        """Greet all engines. If they are greeted again, those that do not answer are greeted later, unless none does.

        Raises the error of an engine that does not answer.
        """
        replicas = list(self._fleet.replicas.values())
        errors = await asyncio.gather(*map(self._greet, replicas), return_exceptions=again)
        missing = [(replica, error) for replica, error in zip(replicas, errors, strict=True) if error is not None]
        for replica, _ in missing:
            self._context.spawn(self._revive(replica))
        if len(missing) == len(replicas):
            raise missing[0][1]

    async def wait_for_engine(self) -> None:
        """Wait until an engine is up; raise `EngineLostError` if none is for `patience_s`."""
        try:
            await asyncio.wait_for(self._is_any_alive.wait(), self.patience_s)
        except TimeoutError:
            names = ", ".join(map(repr, self._fleet.replicas))
            raise EngineLostError(
                f"none of the engines {names} answered for {self.patience_s:g} s: check their logs, and call again"
            ) from None

    async def require_answer(self) -> None:
        """Probe the engines that are up, and mark those that are lost as gone; raise `EngineLostError` if none answers.

        An idle router would notice a loss only at its next call. An engine that is slow to answer is not marked.
        """
        nothing = Releasing(self._context.router, self._context.next_sequence_no(), "", ())
        works = [
            (replica, asyncio.wait_for(replica.engine.release(nothing), PROBE_S)) for replica in self._fleet.alive()
        ]
        for probe in asyncio.as_completed([self._send(replica, work, replica.epoch) for replica, work in works]):
            with suppress(TimeoutError):
                if await probe:
                    return
        raise EngineLostError(f"none of {len(self._fleet.replicas)} engines answers: see why they end, and call again")

    async def load_adapter(self, name: str, files: Mapping[str, bytes], salt: str) -> None:
        """Load an adapter in all engines, in lost ones when they come back. Raises what one of them does."""
        adapter = SentAdapter(self._context.router, salt, name, files)
        if adapter in self._adapters:
            return
        self._adapters.append(adapter)
        with self._lock:
            replicas = [(replica, replica.epoch) for replica in self._fleet.alive()]
            for replica, _ in replicas:
                replica.salts.add(salt)
        try:
            for replica, epoch in replicas:
                try:
                    await replica.engine.load_adapter(adapter)
                except EngineLostError as cause:
                    self.gone(replica, cause, epoch)
        except BaseException:
            self._adapters.remove(adapter)
            raise

    def close_tenant(self, tenant: str, salt: str) -> None:
        """Forget a tenant, and close it at its engines."""
        self._adapters[:] = [adapter for adapter in self._adapters if adapter.salt != salt]
        sequence_no = self._context.next_sequence_no()
        for replica in self._fleet.close_tenant(tenant, salt):
            self.notify(replica, partial(replica.engine.close_tenant, self._context.router, salt, sequence_no))

    async def leave(self) -> None:
        """Release all that engines hold for the router."""
        context = self._context
        with self._lock:
            tenancies = {(replica.engine, salt) for replica in self._fleet.alive() for salt in replica.salts}
            closing = [
                engine.close_tenant(context.router, salt, context.next_sequence_no()) for engine, salt in tenancies
            ]
        with suppress(TimeoutError):
            # Engines that cannot be reached notice soon that the router is gone.
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), self.patience_s)

    def release_message(self, message_id: str) -> None:
        """Release a message that the router no longer needs at all engines that have it."""
        for replica, salt in self._fleet.drop_message(message_id):
            self.release(replica, salt, [message_id])

    def release(self, replica: Replica, salt: str, ids: Sequence[str], left: Sequence[int] = ()) -> None:
        """Tell an engine what the router no longer needs: messages, and calls that it has left without an answer."""
        context = self._context
        releasing = Releasing(context.router, context.next_sequence_no(), salt, tuple(ids), tuple(left))
        self.notify(replica, partial(replica.engine.release, releasing))

    def notify(self, replica: Replica, send: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Send an engine what it need not know once it is gone, or has forgotten what this is about."""
        self._context.soon(lambda: self._context.spawn(self._send(replica, send(), replica.epoch)))

    def gone(self, replica: Replica, cause: EngineLostError, epoch: int) -> None:
        """Mark an engine as gone, and reconnect it in the background. What it had is computed again where it is read.

        Args:
            replica: The engine.
            cause: Error that shows it, ...
            epoch: ... and the epoch of the replica in which it was raised.
        """
        with self._lock:
            if not replica.alive or replica.epoch != epoch:
                return
            self._fleet.lost(replica.name)
            if not self._fleet.alive():
                self._is_any_alive.clear()
        self._context.emit(EngineDown(time.perf_counter(), replica.name, str(cause)))
        self._context.spawn(self._revive(replica))

    async def _greet(self, replica: Replica) -> None:
        reply, loaded = await replica.engine.greet(self._greeting), list[SentAdapter]()
        while True:
            with self._lock:
                missing = [adapter for adapter in self._adapters if all(adapter is not done for done in loaded)]
                if not missing:  # also of those that were loaded elsewhere meanwhile
                    stale = self._fleet.came(replica.name, reply, self._context.is_needed)
                    replica.salts.update(adapter.salt for adapter in loaded)
                    break
            for adapter in missing:
                await replica.engine.load_adapter(adapter)
            loaded += missing
        for salt, ids in stale.items():
            self.release(replica, salt, ids)
        self._context.emit(EngineUp(time.perf_counter(), replica.name))
        self._is_any_alive.set()

    async def _revive(self, replica: Replica) -> None:
        wait_s = _BACKOFF_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)
            try:
                await self._greet(replica)
                return
            except EngineMismatchError as error:
                LOG.warning("a restarted engine does not match, and gets no requests: %s", error)
                return
            except EngineLostError:
                continue
            except Exception:
                LOG.warning("engine %r does not start again, and is retried later:", replica.name, exc_info=True)

    async def _send(self, replica: Replica, work: Coroutine[Any, Any, Any], epoch: int) -> bool:
        """Await work, and return whether the engine is there still."""
        try:
            await work
        except EngineLostError as cause:
            self.gone(replica, cause, epoch)
            return False
        except ChoreoError:
            pass
        return True
