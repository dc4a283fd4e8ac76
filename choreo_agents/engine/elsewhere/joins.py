"""What comes into the view of a call while it runs elsewhere: its engine is sent it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from choreo_agents.engine.elsewhere.fleet import Fleet, Outpost
from choreo_agents.engine.elsewhere.method import ElsewhereView
from choreo_agents.engine.elsewhere.presence import Presence
from choreo_agents.engine.elsewhere.sending import JoiningMessage, rows_of
from choreo_agents.engine.messages.message import Message
from choreo_agents.errors import HandleError
from choreo_agents.runtime.lock import EngineLock


class Joins:
    """Of all calls of a front.

    Args:
        fleet: The engines.
        presence: Which of them are there.
        lock: Guards all bookkeeping.
        front: Names the front.
        next_stamp: Counts what it sends.
    """

    def __init__(
        self, fleet: Fleet, presence: Presence, lock: EngineLock, front: str, next_stamp: Callable[[], int]
    ) -> None:
        self._fleet, self._presence, self._lock, self._front = fleet, presence, lock, front
        self._next_stamp = next_stamp
        self.soon: Callable[[Callable[[], object]], None]
        """Has something done on the front's event loop, from any thread."""

    def begin(self, number: int, salt: str, late: ElsewhereView, outpost: Outpost) -> None:
        """From now on an engine is sent what comes into a call's view. Under the lock.

        Args:
            number: Of the front's request.
            salt: The tenant's.
            late: What comes.
            outpost: The engine.
        """

        def join(parent: Message, offset: int) -> None:
            rows, promised = rows_of([parent], outpost.held.keys())
            self._fleet.holds(outpost.name, {parent.handle.id: salt})
            promised = self._fleet.first_told(outpost.name, promised)
            what = (salt, parent.handle.id, offset, rows, promised)
            joining = JoiningMessage(self._front, self._next_stamp(), number, *what)
            self.soon(lambda: self._presence.tell(outpost, self._join(joining, parent, outpost)))

        late.on_added = join

    async def _join(self, joining: JoiningMessage, parent: Message, outpost: Outpost) -> None:
        try:
            await outpost.engine.join(joining)
        except HandleError:
            # It has not all that the front believed it to have, or not yet: now everything is sent.
            with self._lock:
                rows, promised = rows_of([parent], ())
                first = self._fleet.first_told(outpost.name, promised)
                joining = replace(joining, stamp=self._next_stamp(), rows=rows, promised=first)
            await outpost.engine.join(joining)
