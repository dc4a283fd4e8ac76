"""How a request ends: with a result or without, its end is its own, and gives back all that it held."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from choreo_agents.errors import CapacityError, ChoreoError, EngineFailedError, GuideError, KVMemoryError, told
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.request import Request
from choreo_agents.tracing import EventSink, Ledger, RequestFinished


class Endings:
    """Ends requests. Whatever fails in that fails this request alone, and never raises. Used under the engine's lock.

    Args:
        pool: Where their KV is.
        counters: Counts them.
        emit: Told of them.
        ended: Notified of them.
    """

    def __init__(self, pool: KVPool, counters: Ledger[Counters], emit: EventSink, ended: threading.Condition) -> None:
        self._pool = pool
        self._counters = counters
        self._emit = emit
        self._ended = ended

    def finish(self, request: Request) -> None:
        """End a request that has nothing left to do, with its owner's result: or, if there is none, without."""
        request.over = True
        # From here on a waiting caller can no longer cancel; one that already has takes no lease.
        request.futures = [future for future in request.futures if future.set_running_or_notify_cancel()]
        error: ChoreoError | None = None
        try:
            if request.segment is not None:
                self._pool.complete(request.segment)
            result = request.owner.finish(request)
        except Exception as cause:
            error = failed(cause)
            _done(lambda: request.owner.abandon(request))
        _done(request.encoding.unpin)
        self._count(request, "done" if error is None else "failed")
        for future in request.futures:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str) -> None:
        """End a request without a result. Who still waits for it gets the error."""
        request.over = True
        segment = request.segment
        if segment is not None:
            _done(lambda: self._pool.complete(segment))
        if request.binding is not None:
            _done(request.encoding.unpin)
        _done(lambda: request.owner.abandon(request))
        self._count(request, outcome)
        resolve(request, error)

    def _count(self, request: Request, outcome: str) -> None:
        now, reused, beyond = time.perf_counter(), request.reused, request.beyond
        ended = {"done": "finished", "failed": "failed"}.get(outcome, "cancelled")
        self._counters.add(request.tenant, ended)
        self._counters.add(request.tenant, "tokens_reused", reused)
        self._ended.notify_all()
        told = {"tokens_reused": reused, "tokens_beyond": beyond, **request.charges}
        self._emit(RequestFinished(now, request.number, outcome, **told))


def _done(work: Callable[[], object]) -> None:
    """Do what has to be done and can be done twice, whatever fails: the rest of a request's end must follow."""
    for _ in range(2):
        try:
            work()
            return
        except Exception:
            logging.getLogger(__name__).exception("giving back what a request held has failed; other requests go on")


def failed(cause: BaseException) -> ChoreoError:
    """What a call that fails for this reason raises."""
    if isinstance(cause, KVMemoryError | CapacityError | GuideError):
        return cause
    error = EngineFailedError(f"a step of the engine failed: {told(cause)}")
    error.__cause__ = cause
    return error


def resolve(request: Request, error: ChoreoError | None) -> None:
    """Tell everyone who waits for a request that it ended without a result."""
    for future in request.futures:
        if future.set_running_or_notify_cancel() and error is not None:
            future.set_exception(error)
