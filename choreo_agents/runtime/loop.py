"""The engine's thread: plan the next step, run it, and account for it, batching continuously and without timers.

    ActiveRequests   the queue of waiting requests, the running ones, and how each ends
    NextSteps        decides each next step
    EngineLoop       runs it and accounts for it

A request's end frees its memory, with a result or without, and fails no other request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from choreo_agents.errors import (
    CapacityError,
    ChoreoError,
    ConstraintError,
    DeviceLostError,
    EngineClosedError,
    EngineFailedError,
    KVMemoryError,
    RequestTimeoutError,
    error_text,
)
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.counters import Counters, count_encoded, count_step
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
from choreo_agents.tracing import (
    EventSink,
    FirstToken,
    PerTenantCounters,
    RequestFinished,
    RequestSubmitted,
    StepFailed,
    StepRan,
    guarded,
)

MOST_OVERTAKEN = 64
"""Most requests of a higher priority that may overtake one that came earlier, so that none starves."""
DISK_PATIENCE_S, PAUSE_S = 1.0, 0.005
"""Most seconds between two looks at events that should have been notified, idle and while requests run."""
StepObserver = Callable[[Sequence[tuple[Request, int]]], None]
"""Callback that gets a step as pairs of a request and its number of tokens."""
Planned = tuple[SchedulingPolicy, Limits, StepTrace | None]


class Reclaimer(Protocol):
    """Evicts cached memory when requests need it. Called under the engine's lock."""

    def evictable_tokens(self) -> int: ...

    def evict(self, tokens: int) -> None:
        """Evict cached segments until the pool has room for `tokens`, as far as possible."""
        ...

    def pinned(self, tenant: str) -> str:
        """Return who pins memory, for a tenant to read: ` by 'alice' (96 tokens)`, or an empty text."""
        ...


class ActiveRequests:
    """All requests that were submitted and have not ended. Used under the engine's lock.

    Args:
        pool: Allocates the memory of admitted requests.
        reclaimer: Evicts caches for them.
        counters: Count how requests end.
        emit: Receives events of queued and ended requests.
        ended: Notified when one ends.
    """

    def __init__(
        self,
        pool: KVPool,
        reclaimer: Reclaimer,
        counters: PerTenantCounters[Counters],
        emit: EventSink,
        ended: threading.Condition,
    ) -> None:
        self.waiting: list[Request] = []
        """Requests that hold no memory yet."""
        self.running: dict[int, Request] = {}
        """Running requests by number, in order of admission."""
        self.pool, self._reclaimer, self._counters, self._emit, self._ended = pool, reclaimer, counters, emit, ended
        self._leaving: set[Request] = set()
        """Requests whose tenants have left."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a snapshot: requests may end meanwhile."""
        return iter([*self.waiting, *self.running.values()])

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests behind those of their priority."""
        for request in requests:
            self._announce(request)
            self._enqueue(request)

    def add_elsewhere(self, requests: Sequence[Request]) -> None:
        """Add requests that remote engines run: they need no memory here, and never wait."""
        for request in requests:
            self._announce(request)
            self.running[request.number] = request

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a waiting request, because a caller of that priority waits for it, too."""
        if priority > request.priority and request in self.waiting:
            self.waiting.remove(request)
            request.priority = priority
            self._enqueue(request)

    def room(self) -> int:
        """Return the tokens of KV memory that are free or can be evicted."""
        return self.pool.free_tokens + (self._reclaimer.evictable_tokens() if self.waiting else 0)

    def prepare_queue(self) -> list[Waiting]:
        """Return the queue for the scheduler, after putting in front what must be computed first.

        Stops where the requests would fill the pool together: what the others read is not fetched yet.
        """
        waiting: list[Waiting] = []
        claimed: set[object] = set()
        at = together = 0
        while at < len(self.waiting) and together <= self.pool.total_tokens:
            request = self.waiting[at]
            try:
                ready = request.encoding.ready()
                before = [] if ready else request.encoding.first(request)
            except Exception as error:
                self.fail(request, error)
                continue
            if before:
                for r in before:
                    r.priority = request.priority
                    self._announce(r)
                self.waiting[at:at] = before
                continue
            behind = [r for r in request.encoding.awaits() if r in self.waiting[at + 1 :]]
            if behind:
                # Another request further back recomputes what this one reads: move that forward.
                for r in behind:
                    self.waiting.remove(r)
                    r.priority = max(r.priority, request.priority)
                self.waiting[at:at] = behind
                continue
            room = self.pool.rounded(request.room()) + request.encoding.claimed_tokens(claimed)
            together += room
            after = () if ready else tuple(r.number for r in _predecessors(request))
            prompt = request.encoding.prompt_tokens()
            waiting.append(Waiting(request.number, room, ready, prompt, after, request.priority, request.tenant))
            at += 1
        return waiting

    def can_begin(self, request: Request, chunks: Mapping[int, int]) -> bool:
        """Return whether a waiting request may enter the step that is planned.

        False if one admitted before it has begun to encode what it can reuse, or if the requests that it follows do not
        end in the step after all.

        Args:
            request: A waiting request.
            chunks: Tokens of each request in the step.
        """
        if request.encoding.ready():
            return True
        predecessors = _predecessors(request)
        # One that was not admitted has no tokens pending, and so not as many as were planned.
        return bool(predecessors) and all(chunks.get(earlier.number) == earlier.pending for earlier in predecessors)

    def admit(self, request: Request) -> CapacityError | None:
        """Allocate the memory of a waiting request that can begin, and let it run.

        If there is no memory now, it stays in the queue; if nothing runs that would free memory, return why.
        """
        alone = not self.running
        # If memory is short, try again without reuse: what it would reuse may itself be in the way.
        for reuse in (True, False) if alone else (True,):
            segment: Segment | None = None
            absent, prompt = request.encoding.pin(reuse=reuse)
            try:
                own = self.pool.rounded(prompt + (0 if request.decoding is None else request.decoding.longest))
                self._reclaimer.evict(own + absent)
                read, free = request.encoding.pinned_tokens(), self.pool.free_tokens
                binding = request.encoding.bind()
                segment = None if binding is None else self.pool.allocate(own, binding.position, request.tenant)
                if binding is not None and segment is not None:
                    request.begin(binding, segment)
                    self.waiting.remove(request)
                    self.running[request.number] = request
                    return None
            except BaseException:
                request.encoding.unpin()
                if segment is not None and request.segment is not segment:
                    self.pool.unpin(segment)
                raise
            request.encoding.unpin()
        return self._no_room_error(request, own, absent, read, free) if alone else None

    def given_up_error(self, request: Request) -> CapacityError:
        """Return the error of a request that the scheduling policy gives up."""
        own, absent = self.pool.rounded(request.room()), request.encoding.claimed_tokens(set())
        free = self.pool.free_tokens + self._reclaimer.evictable_tokens()
        return self._no_room_error(request, own, absent, request.encoding.pinned_tokens(), free)

    def _announce(self, request: Request) -> None:
        fields = request.submitted_s, request.number, request.kind, request.author, request.role
        self._emit(RequestSubmitted(*fields))

    def _enqueue(self, request: Request) -> None:
        at = place_in_queue(self.waiting, request.priority)
        for overtaken in self.waiting[at:]:
            overtaken.overtaken += 1
        self.waiting.insert(at, request)

    def drop_tenant(self, tenant: str) -> None:
        """Drop a tenant's requests before the next step."""
        self._leaving.update(request for request in self if request.tenant == tenant)

    def drop_abandoned(self) -> None:
        """Drop requests that no caller waits for any more, and those of tenants that have left."""
        leaving, self._leaving = self._leaving, set()
        for request in leaving:
            self.drop(request, EngineClosedError("the tenant was closed before this call finished"))
        now = time.perf_counter()
        for request in self:
            late = request.pop_expired(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call did not finish in time: raise its timeout_s"))
            if request.cancelled():
                self.drop(request, None, "timed out" if late else "cancelled")

    def finish(self, request: Request) -> None:
        """End a running request that has nothing left to do, with its owner's result or, if that fails, the error.

        The error fails only this request, and is never raised.
        """
        del self.running[request.number]
        request.over = True
        # From here on a caller can no longer cancel; one that already has takes no lease.
        request.futures = [future for future in request.futures if future.set_running_or_notify_cancel()]
        error: ChoreoError | None = None
        try:
            if request.segment is not None:
                self.pool.complete(request.segment)
            result = request.owner.finish(request)
        except Exception as cause:
            error = failed(cause)
            _run_cleanup(lambda: request.owner.abandon(request))
        _run_cleanup(request.encoding.unpin)
        self._count(request, "done" if error is None else "failed")
        for future in request.futures:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """End a request without a result and free its memory; drop running readers of what it will not encode, too.

        Does nothing to a request that has ended.
        """
        if request.over:
            return
        if self.running.pop(request.number, None) is None and request in self.waiting:
            self.waiting.remove(request)
        readers = [reader for reader in self.running.values() if reader.reads_unencoded_of(request)]
        request.over = True
        segment = request.segment
        if segment is not None:
            _run_cleanup(lambda: self.pool.complete(segment))
        if request.binding is not None:
            _run_cleanup(request.encoding.unpin)
        _run_cleanup(lambda: request.owner.abandon(request))
        self._count(request, outcome)
        for future in request.futures:
            if future.set_running_or_notify_cancel() and error is not None:
                future.set_exception(error)
        if request.stop is not None:
            request.stop()
        for reader in readers:
            self.drop(reader, error or EngineClosedError("the input of the call was released before it was encoded"))

    def fail(self, request: Request, cause: BaseException) -> None:
        """End a request with an error, which becomes the caller's if it is one of ours."""
        self.drop(request, cause if isinstance(cause, ChoreoError) else failed(cause))

    def drop_all(self, error: ChoreoError) -> None:
        """End all requests with an error."""
        for request in self:
            self.drop(request, error)

    def _count(self, request: Request, outcome: str) -> None:
        now, reused, beyond = time.perf_counter(), request.reused, request.tokens_outside_view
        ended = {"done": "finished", "failed": "failed"}.get(outcome, "cancelled")
        self._counters.add(request.tenant, ended)
        self._counters.add(request.tenant, "tokens_reused", reused)
        self._ended.notify_all()
        number, charges = request.number, request.charges
        self._emit(RequestFinished(now, number, outcome, tokens_reused=reused, tokens_outside_view=beyond, **charges))

    def _no_room_error(self, request: Request, own: int, absent: int, read: int, free: int) -> CapacityError:
        """Return the error of a request that cannot be admitted though nothing runs.

        Args:
            request: The request.
            own: Tokens of memory that it needs for what it writes, ...
            absent: ... and for what it reads and is not in the pool.
            read: Tokens of what it reads that are pinned in the pool for it.
            free: Tokens that are free once everything unused is evicted.
        """
        pool = self.pool
        needed = f"{own + absent} tokens ({(own + absent) * pool.geometry.bytes_per_token} bytes)"
        if absent:
            needed += f", {own} for what it writes and {absent} for what it reads"
        if own + absent <= free:
            return CapacityError(
                f"the scheduling policy rejected the call: it needs room for {needed}, and {free} of "
                f"{pool.total_tokens} are free or can be evicted. Call again, or change the policy"
            )
        read_part = f", {read} hold what it reads" if read else ""
        free_ones = f"{free} of {pool.total_tokens} are free or can be evicted{read_part}"
        return CapacityError(
            f"the KV pool has no room for {needed}: {free_ones}, and the rest is pinned"
            f"{self._reclaimer.pinned(request.tenant)}. "
            "Unpin messages, lower max_tokens, or load the engine with a larger kv_budget_bytes"
        )


def _predecessors(request: Request) -> Sequence[Request]:
    """Return the requests whose last step it may share though it reads what they encode; a mapper needs that
    earlier."""
    return () if request.mapper else request.encoding.after()


def place_in_queue(queue: Sequence[Request], priority: int, most: int = MOST_OVERTAKEN) -> int:
    """Return the queue index of a new request: behind all of its priority or higher, and any overtaken often enough."""
    at = len(queue)
    while at and queue[at - 1].priority < priority and queue[at - 1].overtaken < most:
        at -= 1
    return at


def _run_cleanup(work: Callable[[], object]) -> None:
    """Run an idempotent cleanup, at most twice, and log its errors: the rest of a request's cleanup must follow."""
    for _ in range(2):
        try:
            work()
            return
        except Exception:
            logging.getLogger(__name__).exception("releasing the memory of a request failed; other requests continue")


def failed(cause: BaseException) -> ChoreoError:
    """Return the error that a call raises for a cause."""
    if isinstance(cause, KVMemoryError | CapacityError | ConstraintError):
        return cause
    error = EngineFailedError(f"a step of the engine failed: {error_text(cause)}")
    error.__cause__ = cause
    return error


class NextStep(NamedTuple):
    """Decision on an engine's next step, made under its lock."""

    rows: list[Row]
    arrivals: list[Arrival]
    """KV to bring into the pool."""
    unfinished: int
    """Number of unfinished requests at the decision; 0 also if there is nothing to wait for."""
    samplers: Mapping[int, Sampler]
    """Samplers by request number, for requests that decode."""
    requests: Sequence[Request] = ()
    """Requests of the rows, in the same order."""


class NextSteps:
    """Decides each next step: which requests are dropped or admitted, and how many tokens of each are encoded.

    The policy decides, or a step trace that is replayed. While every running request samples, and none waits, arrives
    or ends, each step is the last one advanced by a token. That nothing has changed is known without a look at each
    request: every change takes the engine's lock, which counts; a cancelled call wakes the loop; and the first deadline
    is known. Used under the engine's lock.

    Args:
        active: Waiting and running requests.
        lock: The engine's.
        changed: Set whenever there may be something to decide.
        planned: The policy, its limits, and a step trace that records every step or prescribes it.
    """

    def __init__(self, active: ActiveRequests, lock: EngineLock, changed: threading.Event, planned: Planned) -> None:
        self._active, self._lock, self._changed = active, lock, changed
        self._policy, self._limits, self._step_trace = planned
        self.watches: list[StepObserver] = [] if self._step_trace is None else [self._step_trace.record]
        """Observers of every step that is about to run."""
        self._repeated: NextStep | None = None
        """The last step, if the next one may be the same, advanced by a token; until something has changed."""
        self._taken, self._until = 0, 0.0
        """How often the lock had been taken then, and the first deadline of its requests."""

    def decide(self, last_chosen: Mapping[int, SampledToken] | None = None) -> NextStep:
        """Decide the next step.

        Args:
            last_chosen: Tokens that the last step sampled, if no request ended or failed in it.
        """
        last, self._repeated = self._repeated, None
        if last is not None and last_chosen is not None and not self._has_changed():
            rows = [
                Row(number, (last_chosen[number].token,), first + 1, segment, view, samples, adapter, mapper, tenant)
                for number, _, first, segment, view, samples, adapter, mapper, tenant in last.rows
            ]
            for observer in self.watches:
                observer([(request, 1) for request in last.requests])
            self._repeated = last._replace(rows=rows)
            return self._repeated
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
        if active.pool.borrowed:
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
        if repeats and not active.waiting and all_decode(rows, len(running)):
            self._repeat(NextStep(rows, [], len(rows), samplers, served))
        waits = (active.waiting or running) and not refused
        return NextStep(rows, arrivals, unfinished if rows or waits else 0, samplers)

    def _repeat(self, step: NextStep) -> None:
        """Let the next step repeat this one, unless something changes."""
        self._repeated, self._taken = step, self._lock.taken
        deadlines = [deadline for request in step.requests for deadline in request.deadlines.values()]
        self._until = min(deadlines, default=float("inf"))
        for request in step.requests:
            request.watch_cancellation(self._changed.set)

    def _has_changed(self) -> bool:
        """Return whether something has changed since `_repeat`, so that the next step must be decided anew."""
        return self._changed.is_set() or self._lock.taken != self._taken or time.perf_counter() >= self._until

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
            return self._active.admit(request)
        except Exception as cause:
            self._active.drop(request, failed(cause))
            return None


def all_decode(rows: Sequence[Row], running: int) -> bool:
    """Return whether these rows are those of all `running` requests, and each samples after its only token."""
    if not rows or len(rows) < running:
        return False
    return all(row.samples and len(row.tokens) == 1 for row in rows)


def _row(request: Request, count: int) -> Row:
    """Return a request's row in a step, of at most `count` tokens."""
    assert request.binding is not None and request.segment is not None
    first, count = request.encoded, min(count, request.pending)
    samples = not request.ended and count == request.pending
    tokens = tuple(request.tokens[first : first + count])
    made_by = request.adapter, request.mapper, request.tenant
    return Row(request.number, tokens, first, request.segment, request.binding.view, samples, *made_by)


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
        self._active = ActiveRequests(executor.pool, reclaimer, executor.counters, self._emit, self._ended)
        self._next = NextSteps(self._active, lock, self._changed, planned)
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
            rows, arrivals, unfinished, samplers, _ = self._next.decide(last_chosen)
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
        for reader in list(running.values()) if missing else ():
            if reader.binding is not None and reader.binding.reads(missing):
                # KV that it reads could not be brought into the pool.
                self._active.drop(reader, failed(ran.failed.get(reader.number) or ran.passes[-1][2]))
        for row in rows:
            request = running.get(row.number)
            if request is None:
                continue  # it failed, perhaps together with a message that it reads
            failure = ran.failed.get(row.number) if ran.failed else None
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
