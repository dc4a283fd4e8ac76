"""The engine's thread: continuous batching without timers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from choreo_agents.errors import ChoreoError, DeviceLostError, EngineClosedError, told
from choreo_agents.kv.copying import Arrival
from choreo_agents.runtime.attempts import Attempts, Ran
from choreo_agents.runtime.counters import count_encoded, count_step
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.next_step import NextSteps, Planned, Watch
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.step import Row
from choreo_agents.runtime.under_way import Endings, Reclaimer, UnderWay, failed
from choreo_agents.sampling import Chosen
from choreo_agents.tracing import EventSink, FirstToken, StepFailed, StepRan, guarded

DISK_PATIENCE_S, PAUSE_S = 1.0, 0.005
"""Seconds between two looks at what should have been notified of."""


class EngineLoop:
    """Owns the model's thread. Between two steps it admits whatever has arrived and drops what was cancelled.

    Args:
        executor: Runs a step.
        lock: Guards all bookkeeping; held between steps only, never during a forward pass.
        planned: Says what a step does: see `NextSteps`.
        sink: Receives events.
        reclaimer: Whose caches may be evicted to admit a request.
    """

    def __init__(
        self, executor: Executor, lock: EngineLock, planned: Planned, sink: EventSink, reclaimer: Reclaimer
    ) -> None:
        self.executor, self._lock = executor, lock
        self._emit = guarded(sink)
        self._changed = threading.Event()
        """Set whenever there may be something to do; by whom needs no lock."""
        self._ended = lock.condition()
        """Notified whenever a request has ended."""
        pool = executor.pool
        endings = Endings(pool, executor.counters, self._emit, self._ended)
        self._under_way = UnderWay(pool, reclaimer, endings, self._emit)
        self._next = NextSteps(pool, self._under_way, lock, self._changed, planned)
        self._went_on: Mapping[int, Chosen] | None = None
        """What the last step has sampled, if none of its requests has ended or failed with it."""
        self._attempts = Attempts(executor)
        self._closed = False
        self._failure: ChoreoError | None = None
        """What has ended it, if that was not `close`."""
        self._thread: threading.Thread | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those of one call can share their first step. Raises what `require_open` does."""
        with self._lock:
            self.require_open()
            if not requests:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._under_way.add(requests)
            self._changed.set()

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the engine was closed, and what has ended it if it was not."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure.__cause__
        if self._closed:
            raise EngineClosedError("the engine is closed: load a new one")

    def answers(self) -> bool:
        """Whether what it computes with does so still."""
        return self.executor.answers()

    def wake(self) -> None:
        """Let the loop look again at what waits; from any thread, without the lock."""
        self._changed.set()

    def hurry(self, request: Request, priority: int) -> None:
        self._under_way.hurry(request, priority)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`; on another thread, return when none of them runs."""
        with self._lock:
            self._under_way.leave(tenant)
            self._changed.set()
            if not self.is_here:
                self._ended.wait_for(lambda: self._closed or all(r.tenant != tenant for r in self._under_way))

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        return len(self._under_way)

    @property
    def watches(self) -> list[Watch]:
        """Who is told of every step that is about to run."""
        return self._next.watches

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._under_way if request.tenant == tenant]

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
                except DeviceLostError:
                    raise
                except Exception as cause:
                    # No call in particular is to blame: a scheduling policy, or a timetable.
                    with self._lock:
                        self._under_way.drop_all(failed(cause))
        except DeviceLostError as lost:
            self._end(lost)
        except BaseException as cause:
            # The bookkeeping itself failed, so that nothing can go on; but nobody may wait for ever.
            self._end(failed(cause))
            raise

    def _end(self, failure: ChoreoError) -> None:
        """Nothing can go on; everybody is told."""
        with self._lock:
            self._closed, self._failure = True, failure
            self._ended.notify_all()
            self._under_way.drop_all(failure)

    def _wait_for_work(self) -> bool:
        """Sleep until there is a request; False once the engine was closed and its requests have been failed."""
        while True:
            with self._lock.quietly():
                if self._closed:
                    self._under_way.drop_all(EngineClosedError("the engine was closed before this call was done"))
                    return False
                if self.unfinished():
                    return True
                self._changed.clear()
            self._changed.wait()

    def _step(self) -> None:
        """Schedule, run, account."""
        with self._lock.quietly():
            went_on, self._went_on = self._went_on, None
            rows, arrivals, unfinished, samplers = self._next.decide(went_on)
            most = PAUSE_S if self._under_way.running else DISK_PATIENCE_S
            patience = 0.0 if rows or arrivals or self._closed else _patience(self._under_way, most)
        if not rows and not arrivals:
            # All that wait wait for the disk, which tells when it is done; a policy that lets none run does not.
            self._changed.wait(patience if unfinished else 0.0)
            return
        started = time.perf_counter()
        ran = self._attempts.run(rows, arrivals, samplers)
        with self._lock.quietly():
            self._account(rows, arrivals, ran, started, unfinished)

    def _account(
        self, rows: Sequence[Row], arrivals: Sequence[Arrival], ran: Ran, started: float, unfinished: int
    ) -> None:
        now = time.perf_counter()
        for tried, tokens, error in ran.passes:
            self._emit(StepFailed(now, tried, tokens, told(error)))
        there = Counter([request.tenant for request in self._under_way if request.submitted_s <= started])
        own = Counter([row.tenant for row in rows])
        sampled = own if len(ran.chosen) == len(rows) else Counter(r.tenant for r in rows if r.number in ran.chosen)
        count_step(self.executor.counters, own, sampled, there, unfinished)
        running, encoded = self._under_way.running, Counter[tuple[str, tuple[str, ...]]]()
        go_on = not ran.passes
        missing = {arrival.segment for arrival in arrivals if not arrival.is_there}
        for row in rows:
            request = running.get(row.number)
            if request is None:
                continue  # it has ended with what it was to read
            failure = ran.failed.get(row.number) if ran.failed else None
            if missing and failure is None and request.binding is not None and request.binding.reads(missing):
                failure = ran.passes[-1][2]  # what it was to read has not come
            if failure is None:
                try:
                    request.advance(len(row.tokens))
                    encoded[request.tenant, request.counted_as] += len(row.tokens)
                    chosen = ran.chosen.get(row.number)
                    if chosen is not None:
                        self._take(request, chosen, now)
                    if request.ended:
                        go_on = False
                        if request.done():
                            self._under_way.finish(request)
                except Exception as cause:
                    failure = cause
            if failure is not None:
                go_on = False
                self._under_way.drop(request, failed(failure))
        self._went_on = ran.chosen if go_on else None
        count_encoded(self.executor.counters, encoded)
        for request in list(self._under_way.running.values()) if missing else ():
            if request.binding is not None and request.binding.reads(missing):
                self._under_way.drop(request, failed(ran.passes[-1][2]))
        total = sum(len(row.tokens) for row in rows)
        self._emit(StepRan(now, now - started, len(rows), len(ran.chosen), total, unfinished))

    def _take(self, request: Request, chosen: Chosen, now: float) -> None:
        """A step has sampled a token of a request."""
        if request.first_token_s is None:
            self._emit(FirstToken(now, request.number, now - request.submitted_s))
        if request.take(chosen):
            for listener in request.listeners:
                listener(chosen)


def _patience(requests: Iterable[Request], most: float) -> float:
    """Seconds until the loop has to look again by itself."""
    deadlines = [deadline for request in requests for deadline in request.deadlines.values()]
    return max(0.0, min([most, *(deadline - time.perf_counter() for deadline in deadlines)]))
