"""An engine that makes as many steps as a test lets it, so that nothing is over before the test has acted."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

from choreo_agents import Engine

_WAIT_S = 60.0
"""Seconds after which a step that never comes fails the test."""


class Steps:
    """Holds an engine of this process before each of its steps, on the engine's own thread and without its lock.

    Calls are taken in, refused and cancelled meanwhile; a cancelled one is dropped before the next step is made.
    Engines elsewhere are not held.

    Args:
        engine: Which; whatever it has done before.
    """

    def __init__(self, engine: Engine) -> None:
        self._changed = threading.Condition()
        self._may: float = 0
        self._begun = 0
        loop: Any = engine._core.loop
        self._is_here = hasattr(loop, "executor")
        if self._is_here:
            run = loop.executor.run

            def held(*step: Any) -> Any:
                with self._changed:
                    self._begun += 1
                    self._changed.notify_all()
                    assert self._changed.wait_for(lambda: self._begun <= self._may, _WAIT_S), "nobody lets it go on"
                return run(*step)

            loop.executor.run = held

    def make(self, count: int) -> None:
        """Let it make so many further steps, and wait until it is about to make the next. Not on an event loop."""
        if not self._is_here:
            return
        with self._changed:
            self._may += count
            self._changed.notify_all()
            held = self._changed.wait_for(lambda: self._begun > self._may or self._may == math.inf, _WAIT_S)
            assert held, f"it made {self._begun} steps only"

    async def amake(self, count: int) -> None:
        """The same on an event loop, which goes on meanwhile."""
        await asyncio.to_thread(self.make, count)

    def go_on(self) -> None:
        """Hold it no longer."""
        with self._changed:
            self._may = math.inf
            self._changed.notify_all()


async def until(condition: Callable[[], object]) -> None:
    """Let the tasks of an event loop, and other threads, go on until something is so."""
    while not condition():
        # Without a wait of its own, whoever asks an engine takes its lock again before the engine's thread is awake.
        await asyncio.to_thread(int)
