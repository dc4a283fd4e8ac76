"""KV on its way between engines: each message once to each, however many calls wait for it there."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from choreo_agents.engine.delegation import Message
from choreo_agents.errors import ChoreoError, EngineLostError
from choreo_agents.tracing import EventSink, KVCopied, guarded
from choreo_ray.remote.fleet import Fleet, Replica
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.protocol import Copying, Releasing, rows_of

_AT_ONCE = 64
"""Messages of an engine that is to be ended that are copied together."""


class Copies:
    """Used on the router's event loop.

    Args:
        fleet: The engines.
        presence: Told of those that are gone.
        lock: Guards the fleet.
        sink: Receives events.
        router: Names the router.
        next_sequence_no: Counts what it sends.
        needed: Whether the router needs a message, by its id. Under the lock.
    """

    def __init__(
        self,
        fleet: Fleet,
        presence: HealthMonitor,
        lock: AbstractContextManager[None],
        sink: EventSink,
        router: str,
        next_sequence_no: Callable[[], int],
        needed: Callable[[str], bool],
    ) -> None:
        self._fleet, self._presence, self._lock = fleet, presence, lock
        self._emit, self._router, self._next_sequence_no, self._needed = guarded(sink), router, next_sequence_no, needed
        self._coming: dict[tuple[str, str], asyncio.Task[None]] = {}
        """What brings a message's copy to an engine: nobody's alone, so that it goes on when who began it has left."""

    async def bring(self, salt: str, wanted: Mapping[str, str], messages: Mapping[str, Message], to: Replica) -> None:
        """Have messages copied to an engine, as far as they are not there or on their way; what does not come is
        encoded again there.

        Raises:
            EngineLostError: That engine is gone.

        Args:
            salt: The tenant's.
            wanted: Which of them, and from which engine each.
            messages: What a call reads, by id: of these none may be on its way when this returns.
            to: The engine.
        """
        waits: set[asyncio.Task[None]] = set()
        by_source: dict[str, list[Message]] = defaultdict(list)
        with self._lock:
            for message_id, message in messages.items():
                source = wanted.get(message_id)
                if (coming := self._coming.get((to.name, message_id))) is not None:
                    waits.add(coming)  # for another call, or another copy of this one's
                elif source is not None and message_id not in to.held:
                    by_source[source].append(message)
            for source, found in by_source.items():
                copying = self._copying(salt, found, to)
                coming = asyncio.create_task(self._copy(self._fleet.replicas[source], to, copying))
                coming.add_done_callback(_seen)
                self._coming |= dict.fromkeys(((to.name, each) for each in copying.ids), coming)
                waits.add(coming)
        if waits:
            await asyncio.wait(waits)
            for coming in waits:
                coming.result()

    async def settled(self) -> None:
        """Return when nothing is on its way."""
        if coming := set(self._coming.values()):
            await asyncio.wait(coming)

    async def hand_over(self, name: str, known: Callable[[str], Message | None]) -> int:
        """Have all that one engine alone has copied to others, of which each gets a part; how many messages that were.

        Raises what `Fleet.leave` does.

        Args:
            name: The engine, which nothing new is placed at from now on.
            known: Finds a message by its id. Under the lock.
        """
        with self._lock:
            parts: dict[tuple[str, str], dict[str, Message]] = defaultdict(dict)
            for message_id, salt, to in self._fleet.leave(name):
                if (message := known(message_id)) is not None:
                    parts[to.name, salt][message_id] = message
        for (to_name, salt), messages in parts.items():
            to, ids = self._fleet.replicas[to_name], [*messages]
            epoch = to.epoch
            with suppress(EngineLostError):
                for first in range(0, len(ids), _AT_ONCE):
                    some = {each: messages[each] for each in ids[first : first + _AT_ONCE]}
                    try:
                        await self.bring(salt, dict.fromkeys(some, name), some, to)
                    except EngineLostError as cause:
                        self._presence.gone(to, cause, epoch)
                        raise
        with self._lock:
            every = [(to_name, each) for (to_name, _), messages in parts.items() for each in messages]
            return sum(each in self._fleet.replicas[to_name].held for to_name, each in every)

    def _copying(self, salt: str, messages: list[Message], to: Replica) -> Copying:
        rows, _ = rows_of(messages, to.held.keys())
        return Copying(self._router, self._next_sequence_no(), salt, tuple(each.handle.id for each in messages), rows)

    async def _copy(self, source: Replica, to: Replica, copying: Copying) -> None:
        started, epoch, stale = time.perf_counter(), source.epoch, list[str]()
        taken: Collection[str] = ()
        nbytes = 0
        try:
            given = await self._given(source, copying, epoch)
            if given is not None:
                taken, nbytes = await to.engine.import_kv(copying, given)
        except EngineLostError:
            raise
        except ChoreoError:
            pass  # it is encoded again
        finally:
            with self._lock:
                for each in copying.ids:
                    del self._coming[to.name, each]
                self._fleet.holds(to.name, {each: copying.salt for each in taken if self._needed(each)})
                stale = [each for each in taken if not self._needed(each)]
                releasing = Releasing(self._router, self._next_sequence_no(), copying.salt, tuple(stale))
        now, asked = time.perf_counter(), len(copying.ids)
        self._emit(KVCopied(now, source.name, to.name, asked, asked - len(taken), nbytes, now - started))
        if stale:  # whoever wanted it has it no longer
            self._presence.tell(to, to.engine.release(releasing))

    async def _given(self, source: Replica, copying: Copying, epoch: int) -> Any:
        """What an engine gives; None: it is gone."""
        try:
            return await source.engine.export_kv(copying)
        except EngineLostError as cause:
            self._presence.gone(source, cause, epoch)
            return None


def _seen(coming: asyncio.Task[None]) -> None:
    """That a copy has failed is told to who waits for it, if anybody does."""
    if not coming.cancelled():
        coming.exception()
