"""What a front needs no longer, its engines need not keep: each is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from choreo_agents.engine.delegation import MessageTable
from choreo_ray.remote.fleet import Fleet, Outpost
from choreo_ray.remote.presence import Presence
from choreo_ray.remote.sending import Releasing


class GivingBack:
    """Used under the lock, but for `leave`.

    Args:
        fleet: The engines.
        presence: Tells them.
        table: Has the front's messages.
        lock: Guards all bookkeeping.
        front: Names the front.
        next_stamp: Counts what it sends.
    """

    def __init__(
        self,
        fleet: Fleet,
        presence: Presence,
        table: MessageTable,
        lock: AbstractContextManager[None],
        front: str,
        next_stamp: Callable[[], int],
    ) -> None:
        self._fleet, self._presence, self._table, self._lock = fleet, presence, table, lock
        self._front, self._next_stamp = front, next_stamp
        self.salts: dict[str, str] = {}
        """Of tenants that something was sent for, by their names."""
        self.soon: Callable[[Callable[[], object]], None]
        """Has something done on the front's event loop, from any thread."""

    def needed(self, message_id: str) -> bool:
        """Whether the front needs a message."""
        message = self._table.known(message_id)
        return message is not None and message.entry is not None

    def dropped(self, message_id: str) -> None:
        """The front needs a message no longer."""
        for outpost, salt in self._fleet.dropped(message_id):
            self._release(outpost, salt, ids=(message_id,))

    def left(self, outpost: Outpost, salt: str, stamp: int) -> None:
        """The front has left a call without an answer: it may have ended there all the same."""
        self._release(outpost, salt, left=(stamp,))

    def close_tenant(self, tenant: str) -> None:
        """The front serves a tenant no longer."""
        if (salt := self.salts.pop(tenant, None)) is None:
            return
        stamp = self._next_stamp()
        for outpost in self._presence.close_tenant(tenant, salt):
            self._tell(outpost, partial(outpost.engine.close_tenant, self._front, salt, stamp))

    async def leave(self) -> None:
        """Give back all that engines hold for the front."""
        with self._lock:
            held = {(each.engine, salt) for each in self._fleet.alive() for salt in each.salts}
            away = [engine.close_tenant(self._front, salt, self._next_stamp()) for engine, salt in held]
        with suppress(TimeoutError):
            # Who cannot be reached any more misses the front soon.
            await asyncio.wait_for(asyncio.gather(*away, return_exceptions=True), self._presence.patience_s)

    def _release(self, outpost: Outpost, salt: str, ids: tuple[str, ...] = (), left: tuple[int, ...] = ()) -> None:
        releasing = Releasing(self._front, self._next_stamp(), salt, ids, left)
        self._tell(outpost, partial(outpost.engine.release, releasing))

    def _tell(self, outpost: Outpost, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.soon(lambda: self._presence.tell(outpost, work()))
