"""How many calls a tenant may start in a second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from asyncio_throttle import Throttler

from choreo_agents.engine.calls import Decode, Prefill
from choreo_agents.errors import EngineClosedError, InvalidRequestError, RequestTimeoutError


class RateLimiter:
    """Lets calls through at a rate, whichever thread and event loop they come from.

    One event loop of its own, on a thread that the first call starts, waits for all of them.
    """

    def __init__(self, starts_per_s: float) -> None:
        """Let `starts_per_s` calls start in a second: one in so many seconds if it is below 1."""
        self._throttler = Throttler(*_rate(starts_per_s))
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def set_rate(self, starts_per_s: float) -> None:
        """Keep another rate from now on; what has started counts."""
        throttler = self._throttler
        throttler.rate_limit, throttler.period, throttler.retry_interval = _rate(starts_per_s)

    def enter(self, calls: Sequence[Prefill | Decode]) -> Future[None]:
        """A future that is done when all these calls may start.

        It fails with `RequestTimeoutError` if that takes longer than the least patient of them waits, and with
        `EngineClosedError` if it is closed meanwhile.
        """
        patience = min((call.timeout_s for call in calls if call.timeout_s is not None), default=None)
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="choreo-rate-limit", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(self._enter(len(calls), patience), self._loop)

    def close(self) -> None:
        """Fail whoever waits, and end the thread."""
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    async def _enter(self, calls: int, patience: float | None) -> None:
        try:
            # The throttle lets in whoever looks first: only whose turn it is may look.
            async with asyncio.timeout(patience), self._turn:
                for _ in range(calls):
                    await self._throttler.acquire()
        except TimeoutError as error:
            raise RequestTimeoutError(
                "the call could not start in time: see Quota(starts_per_s=...) and its timeout_s"
            ) from error
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("the engine was closed before this call could start") from None
            raise

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
        loop.close()


def _rate(starts_per_s: float) -> tuple[int, float, float]:
    """Starts in a period, the period, and how often to look, both in seconds."""
    if not 0.0 < starts_per_s < float("inf"):
        raise InvalidRequestError(f"starts_per_s must be above 0, not {starts_per_s!r}")
    whole = max(1, round(starts_per_s))
    period = whole / starts_per_s
    return whole, period, min(0.01, period / 4)


async def _cancel_all() -> None:
    """End every other task of this loop."""
    waiting = asyncio.all_tasks() - {asyncio.current_task()}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
