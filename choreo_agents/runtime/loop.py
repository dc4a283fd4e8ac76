"""The engine's thread: continuous batching without timers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from choreo_agents.errors import ChoreoError, EngineClosedError, EngineFailedError, RequestTimeoutError
from choreo_agents.runtime.admission import Admission, Reclaimer
from choreo_agents.runtime.counters import count_step
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.planner import Planner
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.step import Row, Step, make_step
from choreo_agents.sampling import Chosen, Sampler
from choreo_agents.tracing import EventSink, FirstToken, RequestFinished, RequestSubmitted, StepRan, guarded

DISK_PATIENCE_S, PAUSE_S = 1.0, 0.005
"""Seconds between two looks at what should have been notified of."""


class EngineLoop:
    """Owns the model's thread. Between two steps it admits whatever has arrived and drops what was cancelled.

    Args:
        executor: Runs a step.
        lock: Guards all bookkeeping; held between steps only, never during a forward pass.
        planner: Says what a step does.
        sink: Receives events.
        reclaimer: Whose caches may be evicted to admit a request.
    """

    def __init__(
        self,
        executor: Executor,
        lock: threading.RLock,
        planner: Planner,
        sink: EventSink,
        reclaimer: Reclaimer,
    ) -> None:
        self.executor = executor
        self.counters = executor.counters
        self._lock = lock
        self._planner = planner
        self._emit = guarded(sink)
        self._admission = Admission(executor.pool, reclaimer, _announcer(self._emit), self._drop)
        self._running: dict[int, Request] = {}
        self._changed = threading.Event()
        """Set whenever there may be something to do; by whom needs no lock."""
        self._leaving: set[Request] = set()
        """Whose tenants have left."""
        self._ended = threading.Condition(lock)
        """Notified whenever a request has ended."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those of one call can share their first step. Raises `EngineClosedError`."""
        with self._lock:
            self.require_open()
            if not requests:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._admission.add(requests)
            self._changed.set()

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the engine was closed."""
        if self._closed:
            raise EngineClosedError("the engine is closed: load a new one")

    def wake(self) -> None:
        """Let the loop look again at what waits; from any thread, without the lock."""
        self._changed.set()

    def hurry(self, request: Request, priority: int) -> None:
        self._admission.hurry(request, priority)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`; on another thread, return when none of them runs."""
        with self._lock:
            self._leaving.update(request for request in self._unfinished() if request.tenant == tenant)
            self._changed.set()
            if not self.is_here:
                self._ended.wait_for(lambda: self._closed or all(r.tenant != tenant for r in self._unfinished()))

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        return len(self._admission.waiting) + len(self._running)

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._unfinished() if request.tenant == tenant]

    def close(self) -> None:
        """Fail what is unfinished with `EngineClosedError` and end the thread after its current step."""
        with self._lock:
            self._closed = True
            self._changed.set()
            self._ended.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._step()
                except Exception as cause:
                    with self._lock:
                        for request in self._unfinished():
                            self._drop(request, _failed(cause))
        except BaseException as cause:
            # The bookkeeping itself failed, so that nothing can go on; but nobody may wait for ever.
            with self._lock:
                self._closed = True
                self._ended.notify_all()
                for request in self._unfinished():
                    _resolve(request, _failed(cause))
            raise

    def _wait_for_work(self) -> bool:
        """Sleep until there is a request; False once the engine was closed and its requests have been failed."""
        while True:
            with self._lock:
                self._changed.clear()
                if self._closed or self.unfinished():
                    break
            self._changed.wait()
        with self._lock:
            if not self._closed:
                return True
            error = EngineClosedError("the engine was closed before this call was done")
            for request in self._unfinished():
                self._drop(request, error)
            return False

    def _unfinished(self) -> list[Request]:
        return [*self._admission.waiting, *self._running.values()]

    def _step(self) -> None:
        """Schedule, run, account."""
        with self._lock:
            step, unfinished = self._schedule()
            patience = (
                0.0 if step.rows else _patience(self._unfinished(), PAUSE_S if self._running else DISK_PATIENCE_S)
            )
            samplers = _samplers(self._running[row.number] for row in step.rows)
        if not step.rows:
            # All that wait wait for the disk, which tells when it is done; a policy that lets none run does not.
            self._changed.wait(patience if unfinished else 0.0)
            return
        started = time.perf_counter()
        chosen = self.executor.run(step, samplers)
        with self._lock:
            self._account(step, chosen, started, unfinished)

    def _schedule(self) -> tuple[Step, int]:
        self._changed.clear()
        self._drop_left()
        admission = self._admission
        for request in self._running.values():
            admission.add(request.grow())
        seen = admission.seen()
        unfinished = self.unfinished()
        plan = self._planner.plan(seen, admission.waiting, self._running, admission.room())
        if plan is None:
            return make_step([]), unfinished
        by_number = {request.number: request for request in admission.waiting}
        stuck, chunks = list(plan.stuck), dict(plan.chunks)
        for number in plan.admitted:
            request, alone = by_number[number], not self._running
            if not admission.can_begin(request, chunks):
                continue  # it waits on, for what is computed or fetched for it: room is not what it lacks
            if admission.admit(request, alone=alone):
                self._running[number] = request
                admission.add(request.grow())
            elif alone:
                stuck.append(number)
        for number in stuck:
            self._drop(by_number[number], admission.no_room(by_number[number]))
        rows = [_row(self._running[n], count) for n, count in plan.chunks if n in self._running]
        admitted = [self._running[n].binding for n in plan.admitted if n in self._running]
        arrivals = [arrival for binding in admitted if binding is not None for arrival in binding.arrivals]
        self._planner.record([(self._running[row.number], len(row.tokens)) for row in rows])
        waits = (admission.waiting or self._running) and not stuck and not self._closed
        return make_step(rows, arrivals), unfinished if rows or waits else 0

    def _drop_left(self) -> None:
        """Drop what nobody waits for any more, and what tenants have left."""
        leaving, self._leaving = self._leaving, set()
        for request in leaving.intersection(self._unfinished()):
            self._drop(request, EngineClosedError("the tenancy was closed before this call was done"))
        now = time.perf_counter()
        for request in self._unfinished():
            late = request.late(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call was not done in time: see its timeout_s"))
            if request.cancelled():
                self._drop(request, None, "timed out" if late else "cancelled")

    def _account(self, step: Step, chosen: dict[int, Chosen], started: float, unfinished: int) -> None:
        now = time.perf_counter()
        there = [request.tenant for request in self._unfinished() if request.submitted_s <= started]
        count_step(self.counters, [(row.tenant, row.number in chosen) for row in step.rows], there, unfinished)
        for row in step.rows:
            request = self._running[row.number]
            request.advance(len(row.tokens))
            for counters in self.counters.of(request.tenant):
                counters.count(len(row.tokens), again=request.again, mapped=bool(row.mapper))
            if row.number in chosen:
                if request.first_token_s is None:
                    self._emit(FirstToken(now, request.number, now - request.submitted_s))
                request.take(chosen[row.number])
                for listener in request.listeners:
                    listener(chosen[row.number])
            if request.done():
                self._finish(request)
        self._emit(StepRan(now, now - started, len(step.rows), len(chosen), len(step.tokens), unfinished))

    def _finish(self, request: Request) -> None:
        assert request.binding is not None and request.segment is not None
        del self._running[request.number]
        self.counters.add(request.tenant, "finished")
        request.over = True
        self.executor.pool.complete(request.segment)
        # From here on a waiting caller can no longer cancel; one that already has takes no lease.
        request.futures = [future for future in request.futures if future.set_running_or_notify_cancel()]
        try:
            result = request.owner.finish(request)
        except Exception as cause:
            for future in request.futures:
                future.set_exception(_failed(cause))
            raise
        finally:
            request.encoding.unpin()
        self._ended.notify_all()
        self._emit_end(request, "done")
        for future in request.futures:
            future.set_result(result)

    def _drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """End a request without a result and give its memory back."""
        if request in self._admission.waiting:
            self._admission.waiting.remove(request)
        self._running.pop(request.number, None)
        request.over = True
        try:
            if request.segment is not None:
                self.executor.pool.complete(request.segment)
            if request.binding is not None:
                request.encoding.unpin()
            request.owner.abandon(request)
            self.counters.add(request.tenant, "failed" if outcome == "failed" else "cancelled")
            self._emit_end(request, outcome)
        finally:
            _resolve(request, error)
            self._ended.notify_all()

    def _emit_end(self, request: Request, outcome: str) -> None:
        spent, reused = request.charges, request.reused
        self.counters.add(request.tenant, "tokens_reused", reused)
        counts = (spent.encoded, reused, spent.recomputed, request.beyond, spent.mapped)
        self._emit(RequestFinished(time.perf_counter(), request.number, outcome, *counts))


def _row(request: Request, count: int) -> Row:
    assert request.binding is not None and request.segment is not None
    first = request.encoded
    count = min(count, request.pending)
    samples = not request.ended and count == request.pending
    tokens = tuple(request.tokens[first : first + count])
    view, made_by = request.binding.view, (request.adapter, request.mapper)
    return Row(request.number, tokens, first, request.segment, view, samples, *made_by, tenant=request.tenant)


def _samplers(requests: Iterable[Request]) -> dict[int, Sampler]:
    """What chooses the tokens of those that decode."""
    return {each.number: each.decoding.sampler for each in requests if each.decoding is not None}


def _patience(requests: Sequence[Request], most: float) -> float:
    """Seconds until the loop has to look again by itself."""
    deadlines = [deadline for request in requests for deadline in request.deadlines.values()]
    return max(0.0, min([most, *(deadline - time.perf_counter() for deadline in deadlines)]))


def _announcer(emit: EventSink) -> Callable[[Request], None]:
    """Tells a sink of requests that are queued."""
    return lambda request: emit(
        RequestSubmitted(request.submitted_s, request.number, request.kind, request.author, request.role)
    )


def _failed(cause: BaseException) -> EngineFailedError:
    error = EngineFailedError(f"a step of the engine failed: {cause!r}")
    error.__cause__ = cause
    return error


def _resolve(request: Request, error: ChoreoError | None) -> None:
    """Tell everyone who waits for a request that it ended without a result."""
    for future in request.futures:
        if future.set_running_or_notify_cancel() and error is not None:
            future.set_exception(error)
