"""The engine's thread: plan the next step, run it, and account for it, batching continuously and without timers."""

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
from choreo_agents.runtime.active_requests import ActiveRequests, Reclaimer, failed
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
"""Most seconds between two looks at events that should have been notified, idle and while requests run."""
StepObserver = Callable[[Sequence[tuple[Request, int]]], None]
"""Callback that gets a step as pairs of a request and its number of tokens."""
Planned = tuple[SchedulingPolicy, Limits, StepTrace | None]


class EngineLoop:
    """Owns the model's thread. Between two steps it admits new requests and drops cancelled ones.

    Args:
        executor: Runs a step.
        lock: Guards all bookkeeping; held between steps only, never during a forward pass.
        planned: Policy, limits and step trace: see `NextSteps`.
        sink: Receives events.
        reclaimer: Evicts caches to admit a request.
    """

    def __init__(
        self, executor: Executor, lock: EngineLock, planned: Planned, sink: EventSink, reclaimer: Reclaimer
    ) -> None:
        self.executor, self._lock = executor, lock
        self._emit = guarded(sink)
        self._changed = threading.Event()
        """Set whenever there may be something to do; setting it needs no lock."""
        self._ended = lock.condition()
        """Notified whenever a request has ended."""
        pool = executor.pool
        self._active = ActiveRequests(pool, reclaimer, executor.counters, self._emit, self._ended)
        self._next = NextSteps(pool, self._active, lock, self._changed, planned)
        self._last_chosen: Mapping[int, SampledToken] | None = None
        """Tokens that the last step sampled, if no request ended or failed in it."""
        self._retry = StepRetry(executor)
        self._closed = False
        self._failure: ChoreoError | None = None
        """Error that ended the loop, if `close` did not."""
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
            self._active.add(requests)
            self._changed.set()

    def require_open(self) -> None:
        """Raise `EngineClosedError` if the engine was closed, or the error that ended it."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure.__cause__
        if self._closed:
            raise EngineClosedError("the engine is closed: load a new one")

    def answers(self) -> bool:
        """Return whether the device still computes."""
        return self.executor.answers()

    def wake(self) -> None:
        """Let the loop check its queue again; callable from any thread, without the lock."""
        self._changed.set()

    def raise_priority(self, request: Request, priority: int) -> None:
        self._active.raise_priority(request, priority)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`; unless called on the loop's thread, wait until none of
        them runs."""
        with self._lock:
            self._active.drop_tenant(tenant)
            self._changed.set()
            if not self.is_here:
                self._ended.wait_for(lambda: self._closed or all(r.tenant != tenant for r in self._active))

    @property
    def is_here(self) -> bool:
        """True if the current thread is the loop's."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        return len(self._active)

    @property
    def watches(self) -> list[StepObserver]:
        """Observers of every step that is about to run."""
        return self._next.watches

    def requests_of(self, tenant: str) -> list[Request]:
        """Return a tenant's unfinished requests. Call it under the lock."""
        return [request for request in self._active if request.tenant == tenant]

    def close(self) -> None:
        """Fail unfinished requests with `EngineClosedError`, and end the thread after its current step."""
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
                    # No single call is to blame, but the scheduling policy or the step trace.
                    with self._lock:
                        self._active.drop_all(failed(cause))
        except DeviceLostError as lost:
            self._end(lost)
        except BaseException as cause:
            # The bookkeeping itself failed, so that the loop must end; but no caller may wait for ever.
            self._end(failed(cause))
            raise

    def _end(self, failure: ChoreoError) -> None:
        """End the loop with an error that every waiting call gets."""
        with self._lock:
            self._closed, self._failure = True, failure
            self._ended.notify_all()
            self._active.drop_all(failure)

    def _wait_for_work(self) -> bool:
        """Sleep until there is a request; return False once the engine was closed and its requests have been failed."""
        while True:
            with self._lock.quietly():
                if self._closed:
                    self._active.drop_all(EngineClosedError("the engine was closed before this call finished"))
                    return False
                if self.unfinished():
                    return True
                self._changed.clear()
            self._changed.wait()

    def _step(self) -> None:
        """Plan, run and account for one step."""
        with self._lock.quietly():
            last_chosen, self._last_chosen = self._last_chosen, None
            rows, arrivals, unfinished, samplers = self._next.decide(last_chosen)
            most = PAUSE_S if self._active.running else DISK_PATIENCE_S
            patience = 0.0 if rows or arrivals or self._closed else _patience(self._active, most)
        if not rows and not arrivals:
            # Requests that wait for the disk are notified when it is done; a policy that lets none run notifies nobody.
            self._changed.wait(patience if unfinished else 0.0)
            return
        started = time.perf_counter()
        result = self._retry.run(rows, arrivals, samplers)
        with self._lock.quietly():
            self._account(rows, arrivals, result, started, unfinished)

    def _account(
        self, rows: Sequence[Row], arrivals: Sequence[Arrival], ran: StepResult, started: float, unfinished: int
    ) -> None:
        now = time.perf_counter()
        for tried, tokens, error in ran.passes:
            self._emit(StepFailed(now, tried, tokens, error_text(error)))
        present = Counter([request.tenant for request in self._active if request.submitted_s <= started])
        own = Counter([row.tenant for row in rows])
        sampled = own if len(ran.chosen) == len(rows) else Counter(r.tenant for r in rows if r.number in ran.chosen)
        count_step(self.executor.counters, own, sampled, present, unfinished)
        running, encoded = self._active.running, Counter[tuple[str, tuple[str, ...]]]()
        go_on = not ran.passes
        missing = {arrival.segment for arrival in arrivals if not arrival.is_there}
        for row in rows:
            request = running.get(row.number)
            if request is None:
                continue  # it failed together with a message that it reads
            failure = ran.failed.get(row.number) if ran.failed else None
            if missing and failure is None and request.binding is not None and request.binding.reads(missing):
                failure = ran.passes[-1][2]  # KV that it reads could not be brought into the pool
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
                            self._active.finish(request)
                except Exception as cause:
                    failure = cause
            if failure is not None:
                go_on = False
                self._active.drop(request, failed(failure))
        self._last_chosen = ran.chosen if go_on else None
        count_encoded(self.executor.counters, encoded)
        for request in list(self._active.running.values()) if missing else ():
            if request.binding is not None and request.binding.reads(missing):
                self._active.drop(request, failed(ran.passes[-1][2]))
        total = sum(len(row.tokens) for row in rows)
        self._emit(StepRan(now, now - started, len(rows), len(ran.chosen), total, unfinished))

    def _take(self, request: Request, chosen: SampledToken, now: float) -> None:
        """Give a request the token that a step sampled for it."""
        if request.first_token_s is None:
            self._emit(FirstToken(now, request.number, now - request.submitted_s))
        if request.take(chosen):
            for listener in request.listeners:
                listener(chosen)


def _patience(requests: Iterable[Request], most: float) -> float:
    """Return the seconds until the loop must look again by itself, at most `most`."""
    deadlines = [deadline for request in requests for deadline in request.deadlines.values()]
    return max(0.0, min([most, *(deadline - time.perf_counter() for deadline in deadlines)]))


class NextStep(NamedTuple):
    """Decision on an engine's next step, made under its lock."""

    rows: list[Row]
    arrivals: list[Arrival]
    """KV to bring into the pool."""
    unfinished: int
    """Number of unfinished requests at the decision; 0 also if there is nothing to wait for."""
    samplers: Mapping[int, Sampler]
    """Samplers by request number, for requests that decode."""


class NextSteps:
    """Decides each next step: which requests are dropped or admitted, and how many tokens of each are encoded.

    The policy decides, or a step trace that is replayed. While every running request samples, and none waits, arrives
    or ends, each step is the last one advanced by a token. That nothing has changed is known without a look at each
    request: every change takes the engine's lock, which counts; a cancelled call wakes the loop; and the first deadline
    is known. Used under the engine's lock.

    Args:
        pool: Pool that holds KV.
        active: Waiting and running requests.
        lock: The engine's.
        changed: Set whenever there may be something to decide.
        planned: The policy, its limits, and a step trace that records every step or prescribes it.
    """

    def __init__(
        self, pool: KVPool, active: ActiveRequests, lock: EngineLock, changed: threading.Event, planned: Planned
    ) -> None:
        self._pool, self._active = pool, active
        self._lock, self._changed = lock, changed
        self._policy, self._limits, self._step_trace = planned
        self.watches: list[StepObserver] = [] if self._step_trace is None else [self._step_trace.record]
        """Observers of every step that is about to run."""
        self._steady: Steady | None = None
        """The last step, if the next one may be the same, advanced by a token."""

    def decide(self, last_chosen: Mapping[int, SampledToken] | None = None) -> NextStep:
        """Decide the next step.

        Args:
            last_chosen: Tokens that the last step sampled, if no request ended or failed in it.
        """
        steady, self._steady = self._steady, None
        rows = None if steady is None or last_chosen is None else steady.further(last_chosen)
        if steady is not None and rows is not None:
            self._steady = steady
            for observer in self.watches:
                observer([(request, 1) for request in steady.requests])
            return NextStep(rows, [], len(rows), steady.samplers)
        self._changed.clear()
        self._active.drop_abandoned()
        return self._plan_step()

    def _plan_step(self) -> NextStep:
        active, running = self._active, self._active.running
        waiting = active.prepare_queue()
        unfinished = len(active)
        plan = self._plan(waiting, active.room())
        if plan is None:
            return NextStep([], [], unfinished, {})
        by_number = {request.number: request for request in active.waiting}
        refused = {number: active.given_up_error(by_number[number]) for number in plan.stuck}
        chunks = dict(plan.chunks)
        for number in plan.admitted:
            refusal = self._admit(by_number[number], chunks)
            if refusal is not None:
                refused[number] = refusal
        if self._pool.borrowed:
            refused = {}  # whoever copies KV beside the steps frees memory, too, as a running request does
        for number, refusal in refused.items():
            active.drop(by_number[number], refusal)
        rows = [_row(running[n], count) for n, count in plan.chunks if n in running]
        admitted = [running[n].binding for n in plan.admitted if n in running]
        arrivals = [arrival for binding in admitted if binding is not None for arrival in binding.arrivals]
        served = [running[row.number] for row in rows]
        for watch in self.watches if rows else ():
            watch([(request, len(row.tokens)) for request, row in zip(served, rows, strict=True)])
        samplers = {request.number: request.decoding.sampler for request in served if request.decoding is not None}
        # The default policy plans the same again: one token for each request that decodes.
        repeats = self._prescribed is None and type(self._policy) is FirstComeFirstServed
        if repeats and not active.waiting and Steady.suits(rows, len(running)):
            self._steady = Steady(rows, served, samplers, self._lock, self._changed)
        waits = (active.waiting or running) and not refused
        return NextStep(rows, arrivals, unfinished if rows or waits else 0, samplers)

    def _plan(self, waiting: Sequence[Waiting], free_tokens: int) -> Plan | None:
        """Return the policy's plan after checking it; None if the step trace's next step cannot run yet."""
        running = self._active.running
        if self._prescribed is not None:
            return self._prescribed.plan(self._active, running)
        served = [Running(r.number, r.pending, r.priority, r.tenant) for r in running.values()]
        plan = self._policy.plan(waiting, served, free_tokens, self._limits)
        if type(self._policy) is not FirstComeFirstServed:
            require_sound(plan, waiting, served, self._limits)
        return plan

    @property
    def _prescribed(self) -> StepTrace | None:
        """The step trace, if it prescribes the next step."""
        return self._step_trace if self._step_trace is not None and self._step_trace.is_replaying else None

    def _admit(self, request: Request, chunks: Mapping[int, int]) -> CapacityError | None:
        """Admit a waiting request if it can begin; return why it never can, if nothing runs that would free memory."""
        try:
            if request.over or not self._active.can_begin(request, chunks):
                return None  # it waits on for what is computed or fetched for it, not for memory
            return self._active.admit(request, alone=not self._active.running)
        except Exception as cause:
            self._active.drop(request, failed(cause))
            return None


@dataclass
class Steady:
    """Rows of a step that the next one may repeat, each advanced by a token."""

    rows: list[Row]
    """A row of each running request, which samples after its only token."""
    requests: Sequence[Request]
    """Requests of the rows, in the same order."""
    samplers: Mapping[int, Sampler]
    """Samplers by request number."""
    lock: EngineLock
    """The engine's lock, which is held."""
    changed: threading.Event
    """Set whenever there may be something to decide."""

    def __post_init__(self) -> None:
        self._taken = self.lock.taken
        deadlines = [deadline for request in self.requests for deadline in request.deadlines.values()]
        self._until = min(deadlines, default=float("inf"))
        for request in self.requests:
            request.watch_cancellation(self.changed.set)

    @staticmethod
    def suits(rows: Sequence[Row], running: int) -> bool:
        """Return whether these rows are those of all `running` requests, and each samples after its only token."""
        if not rows or len(rows) < running:
            return False
        return all(row.samples and len(row.tokens) == 1 for row in rows)

    def further(self, chosen: Mapping[int, SampledToken]) -> list[Row] | None:
        """Return the next step's rows, or None if something has changed, so that it must be decided anew.

        Args:
            chosen: Tokens that the step sampled; every row continues with its own.
        """
        if self.changed.is_set() or self.lock.taken != self._taken or time.perf_counter() >= self._until:
            return None
        self.rows = [
            Row(number, (chosen[number].token,), first + 1, segment, view, samples, adapter, mapper, tenant)
            for number, _, first, segment, view, samples, adapter, mapper, tenant, *_ in self.rows
        ]
        return self.rows


def _row(request: Request, count: int) -> Row:
    """Return a request's row in a step, of at most `count` tokens."""
    assert request.binding is not None and request.segment is not None
    first, count = request.encoded, min(count, request.pending)
    samples = not request.ended and count == request.pending
    tokens = tuple(request.tokens[first : first + count])
    made_by = request.adapter, request.mapper, request.tenant
    return Row(request.number, tokens, first, request.segment, request.binding.view, samples, *made_by)
