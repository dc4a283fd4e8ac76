"""How many of a tenant's calls may start in a second."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from asyncio_throttle import Throttler

from choreo_agents.errors import EngineClosedError, InvalidRequestError, RequestTimeoutError


class RateLimiter:
    """A queue that lets calls start at a rate, in the order they came, whichever thread and event loop they come from.

    An event loop of its own, on a thread, waits for all of them.
    """

    def __init__(self, calls_per_second: float) -> None:
        self._throttler, self._turn, self._closed = Throttler(1), asyncio.Lock(), False
        self.set_rate(calls_per_second)
        self._lock, self._loop = threading.Lock(), asyncio.new_event_loop()
        threading.Thread(target=self._run, name="choreo-rate-limit", daemon=True).start()

    def set_rate(self, calls_per_second: float) -> None:
        """Keep another rate from now on; what has started counts. Raises `InvalidRequestError` unless it is above 0."""
        if not 0.0 < calls_per_second < float("inf"):
            raise InvalidRequestError(f"calls_per_second must be above 0, not {calls_per_second!r}")
        self._throttler.rate_limit = max(1, round(calls_per_second))
        self._throttler.period = self._throttler.rate_limit / calls_per_second  # below 1: one in so many seconds

    def enter(self, calls: int, timeout_s: float | None = None) -> Future[None]:
        """Return a future that is done when so many more calls may start.

        It fails with `RequestTimeoutError` after `timeout_s`, and with `EngineClosedError` once this is closed.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            return asyncio.run_coroutine_threadsafe(self._enter(calls, timeout_s), self._loop)

    def close(self) -> None:
        """Fail whoever waits, and end the thread; once."""
        with self._lock:
            self._closed, self._throttler.period = True, 0.0  # who waits learns of it at once
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _enter(self, calls: int, timeout_s: float | None) -> None:
        try:
            # The throttle lets in whoever looks first: only whose turn it is may look.
            async with asyncio.timeout(timeout_s), self._turn:
                for _ in range(calls):
                    await self._throttler.acquire()
        except TimeoutError as error:
            raise RequestTimeoutError("no start in time: see calls_per_second, and the call's timeout_s") from error
        if self._closed:
            raise EngineClosedError("the engine was closed before this call could start")

    def _run(self) -> None:
        self._loop.run_forever()
        if waiting := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(waiting))
        self._loop.close()
