"""How many of a tenant's calls may start in a second."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from asyncio_throttle import Throttler

from choreo_agents.errors import EngineClosedError, InvalidRequestError, RequestTimeoutError

_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""By process: a fork has the memory, and not the thread."""
_LOCK = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, on a thread of its own, that waits for all rates of this process."""
    with _LOCK:
        if (process := os.getpid()) not in _LOOPS:
            _LOOPS[process] = asyncio.new_event_loop()
            threading.Thread(target=_LOOPS[process].run_forever, name="choreo-rate-limit", daemon=True).start()
        return _LOOPS[process]


class RateLimiter(Throttler):  # type: ignore[misc]
    """A queue that lets calls start at a rate, in the order they came, whichever thread and event loop they come from.

    Nobody waits while `period` is 0.
    """

    def __init__(self, calls_per_second: float = float("inf")) -> None:
        super().__init__(1)
        self._turn, self._closed = asyncio.Lock(), False
        self.set_rate(calls_per_second)

    def set_rate(self, calls_per_second: float) -> None:
        """Keep another rate from now on, none if it is infinite; what has started counts.

        Raises:
            InvalidRequestError: It is no number above 0.
        """
        if not isinstance(calls_per_second, int | float) or not calls_per_second > 0.0:
            raise InvalidRequestError(f"calls_per_second must be a number above 0, not {calls_per_second!r}")
        self.rate_limit = max(1, round(min(calls_per_second, 1e6)))
        self.period = 0.0 if self._closed else self.rate_limit / calls_per_second  # one in so many seconds, below 1

    def enter(self, calls: int, timeout_s: float | None = None) -> Future[None]:
        """Return a future that is done when so many more calls may start.

        It fails with `RequestTimeoutError` after `timeout_s`, and with `EngineClosedError` once this is closed.
        """
        return asyncio.run_coroutine_threadsafe(self._enter(calls, timeout_s), _loop())

    def close(self) -> None:
        """Fail whoever waits."""
        self._closed, self.period = True, 0.0

    async def _enter(self, calls: int, timeout_s: float | None) -> None:
        try:
            # The throttler lets in whoever looks first: only whose turn it is may look.
            async with asyncio.timeout(timeout_s), self._turn:
                for number in range(calls):
                    await self.acquire()
                    if not number % 256:
                        await asyncio.sleep(0)  # where there is room nothing else lets others have a turn
        except TimeoutError as error:
            raise RequestTimeoutError("no start in time: see calls_per_second, and the call's timeout_s") from error
        if self._closed:
            raise EngineClosedError("the engine was closed before this call could start")
