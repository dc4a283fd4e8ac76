"""Parts that everything in a router shares from one start of its loop to the end of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from choreo_agents.engine.delegation import EngineCore
from choreo_agents.tracing import guarded
from choreo_ray.remote.fleet import Fleet


class RouterContext:
    """Context of a router's parts: the fleet, the messages, their lock, and the event loop that all of them run on.

    Args:
        router: Id of the router.
        fleet: The engines.
        core: Core of the router's engine.
    """

    def __init__(self, router: str, fleet: Fleet, core: EngineCore) -> None:
        self.router, self.fleet, self.table, self.counters = router, fleet, core.table, core.counters
        self.lock = core.lock
        """Guards all bookkeeping."""
        self.emit = guarded(core.settings.sink)
        self.events = asyncio.new_event_loop()
        self.is_closed = False
        # Starts at the time, since engines may remember sequence numbers of this router from before a restart.
        self.next_sequence_no = itertools.count(time.time_ns()).__next__
        """Counts what the router sends."""
        self._spawned = set[asyncio.Task[Any]]()

    def is_needed(self, message_id: str) -> bool:
        """Return whether the router needs a message. Under the lock."""
        message = self.table.known(message_id)
        return message is not None and message.entry is not None

    def soon(self, work: Callable[[], object]) -> None:
        """Run work on the event loop's thread, or not at all once it is closed."""
        if not self.is_closed:
            self.events.call_soon_threadsafe(work)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task that nobody waits for. On the event loop's thread."""
        task = self.events.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
