"""KV on its way between engines: each message is copied once to each engine, however many calls wait for it there."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping

from choreo_agents.engine.delegation import Message
from choreo_agents.errors import ChoreoError, EngineLostError
from choreo_agents.tracing import KVCopied
from choreo_ray.remote.context import RouterContext
from choreo_ray.remote.fleet import Replica
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.protocol import Copying, rows_of

_AT_ONCE = 64
"""Messages of an engine to be drained that are copied together."""


class Copies:
    """Copies of messages that are on their way to engines. Used on the router's event loop.

    Args:
        context: The router's.
        health: Hears of engines that are gone.
    """

    def __init__(self, context: RouterContext, health: HealthMonitor) -> None:
        self._context, self._health = context, health
        self._fleet, self._lock = context.fleet, context.lock
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Task that copies a message to an engine. No call owns it: it goes on when the call that began it has left."""

    async def bring(self, salt: str, sources: Mapping[str, str], messages: Mapping[str, Message], to: Replica) -> None:
        """Copy messages to an engine unless they are there or on their way; what does not arrive is encoded again
        there.

        Raises:
            EngineLostError: That engine is gone.

        Args:
            salt: Salt of the tenant.
            sources: Engine from which each message is to be copied, by id.
            messages: Messages that a call reads, by id: none of them is on its way when this returns.
            to: The engine.
        """
        waits: set[asyncio.Task[None]] = set()
        by_source: dict[str, list[Message]] = defaultdict(list)
        with self._lock:
            for message_id, message in messages.items():
                source = sources.get(message_id)
                if (task := self._tasks.get((to.name, message_id))) is not None:
                    waits.add(task)  # for another call, or another copy of this one's
                elif source is not None and message_id not in to.held:
                    by_source[source].append(message)
            for source, group in by_source.items():
                to.salts.add(salt)  # to be closed there even if nobody needs the copies by the time they arrive
                copying = self._copying(salt, group, to)
                task = asyncio.create_task(self._copy(self._fleet.replicas[source], to, copying))
                task.add_done_callback(_retrieve_error)
                self._tasks |= dict.fromkeys(((to.name, message_id) for message_id in copying.ids), task)
                waits.add(task)
        if waits:
            await asyncio.wait(waits)
            for task in waits:
                task.result()

    async def settled(self) -> None:
        """Wait until nothing is on its way; cancelling this cancels what is."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def hand_over(self, name: str) -> int:
        """Copy all that only one engine has to the others, a part to each; return the number of messages copied.

        Raises what `Fleet.leave` does.

        Args:
            name: Name of the engine, where nothing new is placed from now on.
        """
        with self._lock:
            parts: dict[tuple[str, str], dict[str, Message]] = defaultdict(dict)
            for message_id, salt, to in self._fleet.leave(name):
                if (message := self._context.table.known(message_id)) is not None:
                    parts[to.name, salt][message_id] = message
        for (to_name, salt), messages in parts.items():
            to, ids = self._fleet.replicas[to_name], [*messages]
            epoch = to.epoch
            try:
                for first in range(0, len(ids), _AT_ONCE):
                    some = {message_id: messages[message_id] for message_id in ids[first : first + _AT_ONCE]}
                    await self.bring(salt, dict.fromkeys(some, name), some, to)
            except EngineLostError as cause:
                self._health.gone(to, cause, epoch)
        with self._lock:
            every = [(to_name, message_id) for (to_name, _), messages in parts.items() for message_id in messages]
            return sum(message_id in self._fleet.replicas[to_name].held for to_name, message_id in every)

    def _copying(self, salt: str, messages: list[Message], to: Replica) -> Copying:
        rows, _ = rows_of(messages, to.held.keys())
        ids = tuple(message.handle.id for message in messages)
        return Copying(self._context.router, self._context.next_sequence_no(), salt, ids, rows)

    async def _copy(self, source: Replica, to: Replica, copying: Copying) -> None:
        context, started, epoch = self._context, time.perf_counter(), source.epoch
        taken: Collection[str] = ()
        nbytes = 0
        try:
            try:
                exported = await source.engine.export_kv(copying)
            except EngineLostError as cause:
                self._health.gone(source, cause, epoch)
            else:
                taken, nbytes = await to.engine.import_kv(copying, exported)
        except EngineLostError:
            raise
        except ChoreoError:
            pass  # its reader encodes it again
        finally:
            with self._lock:
                for message_id in copying.ids:
                    del self._tasks[to.name, message_id]
                self._fleet.holds(to.name, {key: copying.salt for key in taken if context.is_needed(key)})
                stale = [message_id for message_id in taken if not context.is_needed(message_id)]
                if stale:  # nobody needs these any more
                    self._health.release(to, copying.salt, stale)
        now, count = time.perf_counter(), len(copying.ids)
        context.emit(KVCopied(now, source.name, to.name, count, count - len(taken), nbytes, now - started))


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Mark the error of a copy as retrieved: whoever waits for it gets it, and asyncio would log it."""
    if not task.cancelled():
        task.exception()
