"""What a router needs no longer, its engines need not keep: each is told."""

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
    """Used under the lock, but for `leave`.

    Args:
        fleet: The engines.
        presence: Tells them.
        table: Has the router's messages.
        lock: Guards all bookkeeping.
        router: Names the router.
        next_sequence_no: Counts what it sends.
    """

    def __init__(
        self,
        fleet: Fleet,
        presence: HealthMonitor,
        table: MessageTable,
        lock: AbstractContextManager[None],
        router: str,
        next_sequence_no: Callable[[], int],
    ) -> None:
        self._fleet, self._presence, self._table, self._lock = fleet, presence, table, lock
        self._router, self._next_sequence_no = router, next_sequence_no
        self.salts: dict[str, str] = {}
        """Of tenants that something was sent for, by their names."""
        self.soon: Callable[[Callable[[], object]], None]
        """Has something done on the router's event loop, from any thread."""

    def needed(self, message_id: str) -> bool:
        """Whether the router needs a message."""
        message = self._table.known(message_id)
        return message is not None and message.entry is not None

    def dropped(self, message_id: str) -> None:
        """The router needs a message no longer."""
        for replica, salt in self._fleet.dropped(message_id):
            self._release(replica, salt, ids=(message_id,))

    def left(self, replica: Replica, salt: str, sequence_no: int) -> None:
        """The router has left a call without an answer: it may have ended there all the same."""
        self._release(replica, salt, left=(sequence_no,))

    def close_tenant(self, tenant: str) -> None:
        """The router serves a tenant no longer."""
        if (salt := self.salts.pop(tenant, None)) is None:
            return
        sequence_no = self._next_sequence_no()
        for replica in self._presence.close_tenant(tenant, salt):
            self._tell(replica, partial(replica.engine.close_tenant, self._router, salt, sequence_no))

    async def leave(self) -> None:
        """Give back all that engines hold for the router."""
        with self._lock:
            held = {(each.engine, salt) for each in self._fleet.alive() for salt in each.salts}
            away = [engine.close_tenant(self._router, salt, self._next_sequence_no()) for engine, salt in held]
        with suppress(TimeoutError):
            # Who cannot be reached any more misses the router soon.
            await asyncio.wait_for(asyncio.gather(*away, return_exceptions=True), self._presence.patience_s)

    def _release(self, replica: Replica, salt: str, ids: tuple[str, ...] = (), left: tuple[int, ...] = ()) -> None:
        releasing = Releasing(self._router, self._next_sequence_no(), salt, ids, left)
        self._tell(replica, partial(replica.engine.release, releasing))

    def _tell(self, replica: Replica, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.soon(lambda: self._presence.tell(replica, work()))
