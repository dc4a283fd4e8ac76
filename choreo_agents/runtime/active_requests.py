"""The queue of waiting requests, the running ones, and how each ends.

A request's end frees its memory, with a result or without, and fails no other request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from choreo_agents.errors import (
    CapacityError,
    ChoreoError,
    ConstraintError,
    EngineClosedError,
    EngineFailedError,
    KVMemoryError,
    RequestTimeoutError,
    error_text,
)
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Waiting
from choreo_agents.tracing import EventSink, PerTenantCounters, RequestFinished, RequestSubmitted

MOST_OVERTAKEN = 64
"""Most requests of a higher priority that may overtake one that came earlier, so that none starves."""


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
        self._pool, self._reclaimer, self._counters, self._emit, self._ended = pool, reclaimer, counters, emit, ended
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
        return self._pool.free_tokens + (self._reclaimer.evictable_tokens() if self.waiting else 0)

    def prepare_queue(self) -> list[Waiting]:
        """Return the queue for the scheduler, after putting in front what must be computed first.

        Stops where the requests would fill the pool together: what the others read is not fetched yet.
        """
        waiting: list[Waiting] = []
        claimed: set[object] = set()
        at = together = 0
        while at < len(self.waiting) and together <= self._pool.total_tokens:
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
            room = self._pool.rounded(request.room()) + request.encoding.claimed_tokens(claimed)
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

    def admit(self, request: Request, *, alone: bool) -> CapacityError | None:
        """Allocate a request's memory and let it run; it stays in the queue if there is no memory now.

        Args:
            request: A waiting request that can begin.
            alone: Whether nothing runs that would free memory: then return why there is none.
        """
        # If memory is short, try again without reuse: what it would reuse may itself be in the way.
        for reuse in (True, False) if alone else (True,):
            segment: Segment | None = None
            absent, prompt = request.encoding.pin(reuse=reuse)
            try:
                own = self._pool.rounded(prompt + (0 if request.decoding is None else request.decoding.longest))
                self._reclaimer.evict(own + absent)
                read, free = request.encoding.pinned_tokens(), self._pool.free_tokens
                binding = request.encoding.bind()
                segment = None if binding is None else self._pool.allocate(own, binding.position, request.tenant)
                if binding is not None and segment is not None:
                    request.begin(binding, segment)
                    self.waiting.remove(request)
                    self.running[request.number] = request
                    return None
            except BaseException:
                request.encoding.unpin()
                if segment is not None and request.segment is not segment:
                    self._pool.unpin(segment)
                raise
            request.encoding.unpin()
        return self._no_room_error(request, own, absent, read, free) if alone else None

    def given_up_error(self, request: Request) -> CapacityError:
        """Return the error of a request that the scheduling policy gives up."""
        own, absent = self._pool.rounded(request.room()), request.encoding.claimed_tokens(set())
        free = self._pool.free_tokens + self._reclaimer.evictable_tokens()
        read, by_policy = request.encoding.pinned_tokens(), own + absent <= free
        return self._no_room_error(request, own, absent, read, free, by_policy=by_policy)

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
                self._pool.complete(request.segment)
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
            _run_cleanup(lambda: self._pool.complete(segment))
        if request.binding is not None:
            _run_cleanup(request.encoding.unpin)
        _run_cleanup(lambda: request.owner.abandon(request))
        self._count(request, outcome)
        resolve(request, error)
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

    def _no_room_error(
        self, request: Request, own: int, absent: int, read: int, free: int, *, by_policy: bool = False
    ) -> CapacityError:
        """Return the error of a request that cannot be admitted though nothing runs.

        Args:
            request: The request.
            own: Tokens of memory that it needs for what it writes, ...
            absent: ... and for what it reads and is not in the pool.
            read: Tokens of what it reads that are pinned in the pool for it.
            free: Tokens that are free once everything unused is evicted.
            by_policy: Whether the scheduling policy gave it up.
        """
        pool = self._pool
        needed = f"{own + absent} tokens ({(own + absent) * pool.geometry.bytes_per_token} bytes)"
        if absent:
            needed += f", {own} for what it writes and {absent} for what it reads"
        if by_policy:
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


def resolve(request: Request, error: ChoreoError | None) -> None:
    """Fail all futures of a request that ended without a result; with no error, only mark cancelled ones."""
    for future in request.futures:
        if future.set_running_or_notify_cancel() and error is not None:
            future.set_exception(error)
