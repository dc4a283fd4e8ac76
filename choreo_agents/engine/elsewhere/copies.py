"""KV on its way between engines: each message once to each, however many calls wait for it there."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from choreo_agents.engine.elsewhere.fleet import Fleet, Outpost
from choreo_agents.engine.elsewhere.presence import Presence
from choreo_agents.engine.elsewhere.sending import Copying, rows_of
from choreo_agents.engine.messages.message import Message
from choreo_agents.errors import ChoreoError, EngineLostError
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.tracing import EventSink, KVCopied, guarded

_AT_ONCE = 64
"""Messages of an engine that is to be ended that are copied together."""


class Copies:
    """Used on the front's event loop.

    Args:
        fleet: The engines.
        presence: Told of those that are gone.
        lock: Guards the fleet.
        sink: Receives events.
        front: Names the front.
        next_stamp: Counts what it sends.
    """

    def __init__(
        self,
        fleet: Fleet,
        presence: Presence,
        lock: EngineLock,
        sink: EventSink,
        front: str,
        next_stamp: Callable[[], int],
    ) -> None:
        self._fleet, self._presence, self._lock = fleet, presence, lock
        self._emit, self._front, self._next_stamp = guarded(sink), front, next_stamp
        self._coming: dict[tuple[str, str], asyncio.Future[None]] = {}
        """Done when a message's copy has come to an engine, or will not."""

    async def bring(self, salt: str, wanted: Mapping[str, str], messages: Mapping[str, Message], to: Outpost) -> None:
        """Have messages copied to an engine, as far as they are not there or on their way; what does not come is
        encoded again there.

        Args:
            salt: The tenant's.
            wanted: Which of them, and from which engine each.
            messages: What a call reads, by id: of these none may be on its way when this returns.
            to: The engine.
        """
        waits: list[asyncio.Future[None]] = []
        begun: dict[tuple[str, str], asyncio.Future[None]] = {}
        by_source: dict[str, list[Message]] = defaultdict(list)
        with self._lock:
            for message_id, message in messages.items():
                key, source = (to.name, message_id), wanted.get(message_id)
                if (coming := self._coming.get(key)) is not None:
                    waits.append(coming)  # for another call, or another copy of this one's
                elif source is not None and message_id not in to.held:
                    by_source[source].append(message)
                    begun[key] = self._coming[key] = asyncio.get_running_loop().create_future()
            copyings = {source: self._copying(salt, found, to) for source, found in by_source.items()}
        try:
            for source, copying in copyings.items():
                await self._copy(self._fleet.outposts[source], to, copying)
        finally:
            with self._lock:
                for key, coming in begun.items():
                    del self._coming[key]
                    coming.set_result(None)
        for coming in waits:
            await coming

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
            ids = [*messages]
            for first in range(0, len(ids), _AT_ONCE):
                some = {each: messages[each] for each in ids[first : first + _AT_ONCE]}
                await self.bring(salt, dict.fromkeys(some, name), some, self._fleet.outposts[to_name])
        with self._lock:
            every = [(to_name, each) for (to_name, _), messages in parts.items() for each in messages]
            return sum(each in self._fleet.outposts[to_name].held for to_name, each in every)

    def _copying(self, salt: str, messages: list[Message], to: Outpost) -> Copying:
        rows, _ = rows_of(messages, to.held.keys())
        return Copying(self._front, self._next_stamp(), salt, tuple(each.handle.id for each in messages), rows)

    async def _copy(self, source: Outpost, to: Outpost, copying: Copying) -> None:
        started = time.perf_counter()
        try:
            given = await source.engine.give(copying)
        except EngineLostError as cause:
            self._presence.gone(source, cause)
            return
        try:
            taken, nbytes = await to.engine.take(copying, given)
        except EngineLostError:
            raise
        except ChoreoError:
            taken, nbytes = (), 0
        with self._lock:
            self._fleet.holds(to.name, dict.fromkeys(taken, copying.salt))
        now, asked = time.perf_counter(), len(copying.ids)
        self._emit(KVCopied(now, source.name, to.name, asked, asked - len(taken), nbytes, now - started))
