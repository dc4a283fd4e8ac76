"""Rate limit for the starts of a tenant's calls."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from asyncio_throttle import Throttler

from choreo_agents.errors import EngineClosedError, InvalidRequestError, RequestTimeoutError

_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""Event loops by process id: a fork has the memory, and not the thread."""
_LOCK = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return this process' event loop for rate limits, which runs on a thread of its own."""
    with _LOCK:
        if (process := os.getpid()) not in _LOOPS:
            _LOOPS[process] = asyncio.new_event_loop()
            threading.Thread(target=_LOOPS[process].run_forever, name="choreo-rate-limit", daemon=True).start()
        return _LOOPS[process]


class RateLimiter(Throttler):  # type: ignore[misc]
    """Queue that lets calls start at a rate, in order of arrival, from any thread and event loop.

    No call waits while `period` is 0.
    """

    def __init__(self, calls_per_second: float = float("inf")) -> None:
        super().__init__(1)
        self._turn, self._closed = asyncio.Lock(), False
        self.set_rate(calls_per_second)

    def set_rate(self, calls_per_second: float) -> None:
        """Set another rate from now on, unlimited if it is infinite; earlier starts still count.

        Raises:
            InvalidRequestError: It is not a number above 0.
        """
        if not isinstance(calls_per_second, int | float) or not calls_per_second > 0.0:
            raise InvalidRequestError(f"calls_per_second must be a number above 0, not {calls_per_second!r}")
        self.rate_limit = max(1, round(min(calls_per_second, 1e6)))
        self.period = 0.0 if self._closed else self.rate_limit / calls_per_second  # rates below 1: one per period

    def enter(self, calls: int, timeout_s: float | None = None) -> Future[None]:
        """Return a future that is done when so many more calls may start.

        It fails with `RequestTimeoutError` after `timeout_s`, and with `EngineClosedError` once this is closed.
        """
        return asyncio.run_coroutine_threadsafe(self._enter(calls, timeout_s), _loop())

    def close(self) -> None:
        """Fail all waiting calls."""
        self._closed, self.period = True, 0.0

    async def _enter(self, calls: int, timeout_s: float | None) -> None:
        try:
            # The throttler admits whichever task checks first: the lock keeps the order of arrival.
            async with asyncio.timeout(timeout_s), self._turn:
                for _ in range(calls):
                    await self.acquire()
                    await asyncio.sleep(0)  # without a wait, nothing else yields to other tasks
        except TimeoutError as error:
            raise RequestTimeoutError("the call did not start in time: raise calls_per_second or timeout_s") from error
        if self._closed:
            raise EngineClosedError("the engine was closed before this call could start")
