"""Releases for engines: each is told what its router no longer needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from choreo_agents.engine.delegation import MessageTable
from choreo_ray.remote.fleet import Fleet, Replica
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.protocol import Releasing


class ReleaseQueue:
    """Queue of releases for engines. Used under the lock, except for `leave`.

    Args:
        fleet: The engines.
        health: Sends them.
        table: The router's table of messages.
        lock: Guards all bookkeeping.
        router: Id of the router.
        next_sequence_no: Counts what the router sends.
    """

    def __init__(
        self,
        fleet: Fleet,
        health: HealthMonitor,
        table: MessageTable,
        lock: AbstractContextManager[None],
        router: str,
        next_sequence_no: Callable[[], int],
    ) -> None:
        self._fleet, self._health, self._table, self._lock = fleet, health, table, lock
        self._router, self._next_sequence_no = router, next_sequence_no
        self.salts: dict[str, str] = {}
        """Salts of tenants that something was sent for, by tenant."""
        self.soon: Callable[[Callable[[], object]], None]
        """Runs work on the router's event loop, from any thread."""

    def is_needed(self, message_id: str) -> bool:
        """Return whether the router needs a message."""
        message = self._table.known(message_id)
        return message is not None and message.entry is not None

    def release_message(self, message_id: str) -> None:
        """Release a message that the router no longer needs."""
        for replica, salt in self._fleet.drop_message(message_id):
            self._release(replica, salt, ids=(message_id,))

    def abandon_call(self, replica: Replica, salt: str, sequence_no: int) -> None:
        """Report a call that the router has left without an answer: it may have ended there all the same."""
        self._release(replica, salt, abandoned=(sequence_no,))

    def close_tenant(self, tenant: str) -> None:
        """Close a tenant at its engines."""
        if (salt := self.salts.pop(tenant, None)) is None:
            return
        sequence_no = self._next_sequence_no()
        for replica in self._health.close_tenant(tenant, salt):
            self._notify(replica, partial(replica.engine.close_tenant, self._router, salt, sequence_no))

    async def leave(self) -> None:
        """Release all that engines hold for the router."""
        with self._lock:
            tenancies = {(replica.engine, salt) for replica in self._fleet.alive() for salt in replica.salts}
            closing = [engine.close_tenant(self._router, salt, self._next_sequence_no()) for engine, salt in tenancies]
        with suppress(TimeoutError):
            # Engines that cannot be reached notice soon that the router is gone.
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), self._health.patience_s)

    def _release(self, replica: Replica, salt: str, ids: tuple[str, ...] = (), abandoned: tuple[int, ...] = ()) -> None:
        releasing = Releasing(self._router, self._next_sequence_no(), salt, ids, abandoned)
        self._notify(replica, partial(replica.engine.release, releasing))

    def _notify(self, replica: Replica, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.soon(lambda: self._health.notify(replica, work()))
