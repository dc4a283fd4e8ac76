"""The event loop's turn: given to others now and then by those whose answers are there already."""

from __future__ import annotations

import asyncio
import time
from weakref import WeakKeyDictionary

SLICE_S = 0.005
"""Seconds for which one may go on: as long as the interpreter lets a thread, when others want to run."""


class LoopTurns:
    """Who awaits what is there does not wait, and so would keep its event loop from all others, timeouts, and its own
    cancelling. Of each loop, remembers when somebody last waited here."""

    def __init__(self) -> None:
        self._given_s: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()

    async def given(self) -> None:
        """Let others have their turn if it is time, and end here if the task was cancelled."""
        loop, task, now = asyncio.get_running_loop(), asyncio.current_task(), time.perf_counter()
        if now - self._given_s.get(loop, 0.0) > SLICE_S or (task is not None and task.cancelling()):
            await asyncio.sleep(0)
            self._given_s[loop] = time.perf_counter()
