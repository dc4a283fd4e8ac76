"""The engine's thread, continuous batching without timers: what the next step does is decided, run, and accounted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from choreo_agents.errors import CapacityError, ChoreoError, DeviceLostError, EngineClosedError, error_text
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.active_requests import ActiveRequests, Completion, Reclaimer, failed
from choreo_agents.runtime.counters import count_encoded, count_step
from choreo_agents.runtime.executor import Executor, StepResult, StepRetry
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import (
    FirstComeFirstServed,
    Limits,
    Plan,
    Running,
    SchedulingPolicy,
    Waiting,
    require_sound,
)
from choreo_agents.runtime.step import Row
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.sampling import SampledToken, Sampler
from choreo_agents.tracing import EventSink, FirstToken, StepFailed, StepRan, guarded

DISK_PATIENCE_S, PAUSE_S = 1.0, 0.005
"""Seconds between two looks at what should have been notified of."""
StepObserver = Callable[[Sequence[tuple[Request, int]]], None]
"""Is told of a step: requests, and how many tokens of each."""
Planned = tuple[SchedulingPolicy, Limits, StepTrace | None]


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
        endings = Completion(pool, executor.counters, self._emit, self._ended)
        self._under_way = ActiveRequests(pool, reclaimer, endings, self._emit)
        self._next = NextSteps(pool, self._under_way, lock, self._changed, planned)
        self._went_on: Mapping[int, SampledToken] | None = None
        """What the last step has sampled, if none of its requests has ended or failed with it."""
        self._attempts = StepRetry(executor)
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

    def raise_priority(self, request: Request, priority: int) -> None:
        self._under_way.raise_priority(request, priority)

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
    def watches(self) -> list[StepObserver]:
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
        self, rows: Sequence[Row], arrivals: Sequence[Arrival], ran: StepResult, started: float, unfinished: int
    ) -> None:
        now = time.perf_counter()
        for tried, tokens, error in ran.passes:
            self._emit(StepFailed(now, tried, tokens, error_text(error)))
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

    def _take(self, request: Request, chosen: SampledToken, now: float) -> None:
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


class NextStep(NamedTuple):
    """Of an engine, as it was decided under its lock."""

    rows: list[Row]
    arrivals: list[Arrival]
    """What it brings into the pool."""
    unfinished: int
    """Requests that were when it was decided; 0 if there is nothing to wait for, either."""
    samplers: Mapping[int, Sampler]
    """By request, of those that decode."""


class NextSteps:
    """Decides one after the other: who is dropped, who is admitted, and how many tokens of whom a step encodes.

    A policy says it, or a timetable that is kept to. Where all that run sample a token, and nobody waits, comes or
    goes, each step is the one before, a token further. That nothing has happened is known without a look at each
    request: whoever changes something takes the engine's lock, which counts; a call that is cancelled wakes the loop;
    and when the first gives up is known. Used under the engine's lock.

    Args:
        pool: Gives room.
        under_way: Has those that wait, and those that run.
        lock: The engine's.
        changed: Set whenever there may be something to decide about.
        planned: The policy that says what a step does, its bounds, and a timetable that writes down every step, or
            prescribes them.
    """

    def __init__(
        self, pool: KVPool, under_way: ActiveRequests, lock: EngineLock, changed: threading.Event, planned: Planned
    ) -> None:
        self._pool, self._under_way = pool, under_way
        self._lock, self._changed = lock, changed
        self._policy, self._limits, self._step_trace = planned
        self.watches: list[StepObserver] = [] if self._step_trace is None else [self._step_trace.record]
        """Are told of every step that is about to run, if anybody is."""
        self._steady: Steady | None = None
        """The last step, if the next one may be the same a token further."""

    def decide(self, went_on: Mapping[int, SampledToken] | None = None) -> NextStep:
        """The next step.

        Args:
            went_on: What the last step has sampled, if none of its requests has ended or failed with it.
        """
        steady, self._steady = self._steady, None
        rows = None if steady is None or went_on is None else steady.further(went_on)
        if steady is not None and rows is not None:
            self._steady = steady
            for watch in self.watches:
                watch([(request, 1) for request in steady.requests])
            return NextStep(rows, [], len(rows), steady.samplers)
        self._changed.clear()
        self._under_way.drop_left()
        return self._planned()

    def _planned(self) -> NextStep:
        under_way, running = self._under_way, self._under_way.running
        seen = under_way.seen()
        unfinished = len(under_way)
        plan = self._plan(seen, under_way.room())
        if plan is None:
            return NextStep([], [], unfinished, {})
        by_number = {request.number: request for request in under_way.waiting}
        refused = {number: under_way.given_up(by_number[number]) for number in plan.stuck}
        chunks = dict(plan.chunks)
        for number in plan.admitted:
            refusal = self._admit(by_number[number], chunks)
            if refusal is not None:
                refused[number] = refusal
        if self._pool.borrowed:
            refused = {}  # who copies beside steps gives room back, as who runs does
        for number, refusal in refused.items():
            under_way.drop(by_number[number], refusal)
        rows = [_row(running[n], count) for n, count in plan.chunks if n in running]
        admitted = [running[n].binding for n in plan.admitted if n in running]
        arrivals = [arrival for binding in admitted if binding is not None for arrival in binding.arrivals]
        served = [running[row.number] for row in rows]
        for watch in self.watches if rows else ():
            watch([(request, len(row.tokens)) for request, row in zip(served, rows, strict=True)])
        samplers = {each.number: each.decoding.sampler for each in served if each.decoding is not None}
        # The same requests get again what they got: a token of each that decodes.
        repeats = self._prescribed is None and type(self._policy) is FirstComeFirstServed
        if repeats and not under_way.waiting and Steady.suits(rows, len(running)):
            self._steady = Steady(rows, served, samplers, self._lock, self._changed)
        waits = (under_way.waiting or running) and not refused
        return NextStep(rows, arrivals, unfinished if rows or waits else 0, samplers)

    def _plan(self, seen: Sequence[Waiting], free_tokens: int) -> Plan | None:
        """What the policy says of those that wait, if it is sound; None if the timetable's next step cannot run yet."""
        running = self._under_way.running
        if self._prescribed is not None:
            return self._prescribed.plan(self._under_way, running)
        served = [Running(r.number, r.pending, r.priority, r.tenant) for r in running.values()]
        plan = self._policy.plan(seen, served, free_tokens, self._limits)
        if type(self._policy) is not FirstComeFirstServed:
            require_sound(plan, seen, served, self._limits)
        return plan

    @property
    def _prescribed(self) -> StepTrace | None:
        """The timetable, if it says what the next step is."""
        return self._step_trace if self._step_trace is not None and self._step_trace.is_kept_to else None

    def _admit(self, request: Request, chunks: Mapping[int, int]) -> CapacityError | None:
        """Let a request run that waits, if it can begin; why it never can, if nothing runs that would make room."""
        try:
            if request.over or not self._under_way.can_begin(request, chunks):
                return None  # it waits on, for what is computed or fetched for it: room is not what it lacks
            return self._under_way.admit(request, alone=not self._under_way.running)
        except Exception as cause:
            self._under_way.drop(request, failed(cause))
            return None


@dataclass
class Steady:
    """The rows of a step that may be followed by the same, a token further."""

    rows: list[Row]
    """One of each request that runs, which samples after its only token."""
    requests: Sequence[Request]
    """Whose they are, in the same order."""
    samplers: Mapping[int, Sampler]
    """By request."""
    lock: EngineLock
    """The engine's, which is held."""
    changed: threading.Event
    """Set whenever there may be something to decide about."""

    def __post_init__(self) -> None:
        self._taken = self.lock.taken
        deadlines = [deadline for request in self.requests for deadline in request.deadlines.values()]
        self._until = min(deadlines, default=float("inf"))
        for request in self.requests:
            request.tell_cancelled(self.changed.set)

    @staticmethod
    def suits(rows: Sequence[Row], running: int) -> bool:
        """Return whether these rows are those of all `running` requests, and each samples after its only token."""
        if not rows or len(rows) < running:
            return False
        return all(row.samples and len(row.tokens) == 1 for row in rows)

    def further(self, chosen: Mapping[int, SampledToken]) -> list[Row] | None:
        """The next step's rows; None if something has happened, so that it has to be decided anew.

        Args:
            chosen: What the step has sampled; every row goes on with that.
        """
        if self.changed.is_set() or self.lock.taken != self._taken or time.perf_counter() >= self._until:
            return None
        self.rows = [
            Row(number, (chosen[number].token,), first + 1, segment, view, samples, adapter, mapper, tenant)
            for number, _, first, segment, view, samples, adapter, mapper, tenant, *_ in self.rows
        ]
        return self.rows


def _row(request: Request, count: int) -> Row:
    """What a step encodes of a request: so many tokens at most."""
    assert request.binding is not None and request.segment is not None
    first, count = request.encoded, min(count, request.pending)
    samples = not request.ended and count == request.pending
    tokens = tuple(request.tokens[first : first + count])
    made_by = request.adapter, request.mapper, request.tenant
    return Row(request.number, tokens, first, request.segment, request.binding.view, samples, *made_by)
