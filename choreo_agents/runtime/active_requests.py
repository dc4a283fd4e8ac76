"""Who is under way: the requests that wait, in which order and for what, and those that run, until they end.

With a result or without, the end of each is its own, and gives back all that it held.
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
"""How many requests of a higher priority may be put before one that came earlier: so that none starves."""


class Reclaimer(Protocol):
    """Gives cached memory back when requests need it. Called under the engine's lock."""

    def evictable_tokens(self) -> int: ...

    def evict(self, tokens: int) -> None:
        """Free cached segments until the pool has room for `tokens`, as far as possible."""
        ...

    def pinned(self, tenant: str) -> str:
        """Who keeps memory from being evicted, for a tenant to read: ` by 'alice' (96 tokens)`, or nothing."""
        ...


class ActiveRequests:
    """All requests that were submitted and have not ended. Used under the engine's lock.

    Args:
        pool: Where those that are admitted get their memory.
        reclaimer: Whose caches may be evicted for it.
        endings: Ends requests.
        emit: Told of those that are queued.
    """

    def __init__(self, pool: KVPool, reclaimer: Reclaimer, endings: Completion, emit: EventSink) -> None:
        self.waiting: list[Request] = []
        """They hold no memory yet."""
        self.running: dict[int, Request] = {}
        """By number, in order of admission."""
        self._pool, self._reclaimer, self._endings, self._emit = pool, reclaimer, endings, emit
        self._leaving: set[Request] = set()
        """Whose tenants have left."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        """All as they are now, whatever ends meanwhile."""
        return iter([*self.waiting, *self.running.values()])

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests behind those of their priority."""
        for request in requests:
            self._announce(request)
            self._place(request)

    def raise_priority(self, request: Request, priority: int) -> None:
        """Give a request that waits a higher priority, because somebody of that priority waits for it, too."""
        if priority > request.priority and request in self.waiting:
            self.waiting.remove(request)
            request.priority = priority
            self._place(request)

    def room(self) -> int:
        """Tokens that are free or can be evicted."""
        return self._pool.free_tokens + (self._reclaimer.evictable_tokens() if self.waiting else 0)

    def seen(self) -> list[Waiting]:
        """The queue as the scheduler sees it, once what has to come first was put in front.

        Only as far as its requests have room in the pool together: what the others read is not fetched yet.
        """
        seen: list[Waiting] = []
        claimed: set[object] = set()
        at = together = 0
        while at < len(self.waiting) and together <= self._pool.total_tokens:
            request = self.waiting[at]
            try:
                ready = request.encoding.ready()
                before = [] if ready else request.encoding.first(request)
            except Exception as error:
                self.drop(request, error if isinstance(error, ChoreoError) else failed(error))
                continue
            if before:
                for r in before:
                    r.priority = request.priority
                    self._announce(r)
                self.waiting[at:at] = before
                continue
            behind = [r for r in request.encoding.awaits() if r in self.waiting[at + 1 :]]
            if behind:
                # What it reads is computed again for somebody who stands further back: now for it first.
                for r in behind:
                    self.waiting.remove(r)
                    r.priority = max(r.priority, request.priority)
                self.waiting[at:at] = behind
                continue
            room = self._pool.rounded(request.room()) + request.encoding.claimed_tokens(claimed)
            together += room
            after = () if ready else tuple(r.number for r in _followed(request))
            prompt = request.encoding.prompt_tokens()
            seen.append(Waiting(request.number, room, ready, prompt, after, request.priority, request.tenant))
            at += 1
        return seen

    def can_begin(self, request: Request, chunks: Mapping[int, int]) -> bool:
        """Whether nothing that a request waits for keeps it from a step.

        False if one admitted before it has begun to encode what it can reuse, or if what it follows on does not end in
        the step after all.

        Args:
            request: One of those that wait.
            chunks: Tokens of each request in the step.
        """
        if request.encoding.ready():
            return True
        followed = _followed(request)
        # One that was not admitted after all has no tokens to encode, and so not as many as were planned.
        return bool(followed) and all(chunks.get(each.number) == each.pending for each in followed)

    def admit(self, request: Request, *, alone: bool) -> CapacityError | None:
        """Give a request that can begin its memory, and let it run; it stays in the queue if there is no room now.

        Args:
            request: One of those that wait.
            alone: Nothing is running that would give memory back: then it is told why there is no room.
        """
        # What it would reuse may itself be in the way.
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
        return self._no_room(request, own, absent, read, free) if alone else None

    def given_up(self, request: Request) -> CapacityError:
        """Why a request fails that the scheduling policy gives up."""
        own, absent = self._pool.rounded(request.room()), request.encoding.claimed_tokens(set())
        free = self._pool.free_tokens + self._reclaimer.evictable_tokens()
        read, by_policy = request.encoding.pinned_tokens(), own + absent <= free
        return self._no_room(request, own, absent, read, free, by_policy=by_policy)

    def _announce(self, request: Request) -> None:
        told = request.submitted_s, request.number, request.kind, request.author, request.role
        self._emit(RequestSubmitted(*told))

    def _place(self, request: Request) -> None:
        at = place_in_queue(self.waiting, request.priority)
        for overtaken in self.waiting[at:]:
            overtaken.overtaken += 1
        self.waiting.insert(at, request)

    def leave(self, tenant: str) -> None:
        """Drop a tenant's requests before the next step."""
        self._leaving.update(request for request in self if request.tenant == tenant)

    def drop_left(self) -> None:
        """Drop what nobody waits for any more, and what tenants have left."""
        leaving, self._leaving = self._leaving, set()
        for request in leaving:
            self.drop(request, EngineClosedError("the tenancy was closed before this call was done"))
        now = time.perf_counter()
        for request in self:
            late = request.late(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call was not done in time: see its timeout_s"))
            if request.cancelled():
                self.drop(request, None, "timed out" if late else "cancelled")

    def finish(self, request: Request) -> None:
        """End a running request that has nothing left to do."""
        del self.running[request.number]
        self._endings.finish(request)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """End a request without a result and give its memory back; with it, who reads what it will not encode.

        One that has ended already stays as it is.
        """
        if request.over:
            return
        if self.running.pop(request.number, None) is None and request in self.waiting:
            self.waiting.remove(request)
        readers = [other for other in self.running.values() if other.reads_unencoded_of(request)]
        self._endings.drop(request, error, outcome)
        for reader in readers:
            self.drop(reader, error or EngineClosedError("what the call reads was given up before it was encoded"))

    def drop_all(self, error: ChoreoError) -> None:
        """End all requests with an error."""
        for request in self:
            self.drop(request, error)

    def _no_room(
        self, request: Request, own: int, absent: int, read: int, free: int, *, by_policy: bool = False
    ) -> CapacityError:
        """Why a request cannot be admitted though nothing runs.

        Args:
            request: Which.
            own: Tokens of room that it needs for what it writes, ...
            absent: ... and for what it reads and nobody keeps in the pool.
            read: Tokens of what it reads that were kept in the pool for it.
            free: Tokens of room that there is when all that nobody needs is evicted.
            by_policy: Whether the scheduling policy gave it up.
        """
        pool = self._pool
        wanted = f"{own + absent} tokens ({(own + absent) * pool.geometry.bytes_per_token} bytes)"
        if absent:
            wanted += f", {own} for what it writes and {absent} for what it reads"
        if by_policy:
            return CapacityError(
                f"the scheduling policy gave the call up: it needs room for {wanted}, and {free} of "
                f"{pool.total_tokens} are free or can be evicted. Let the policy admit it, or call again"
            )
        held = f", {read} hold what it reads" if read else ""
        free_ones = f"{free} of {pool.total_tokens} are free or can be evicted{held}"
        return CapacityError(
            f"the KV pool has no room for {wanted}: {free_ones}, and the rest is pinned"
            f"{self._reclaimer.pinned(request.tenant)}. "
            "Unpin messages, lower max_tokens, or load the engine with a larger kv_budget_bytes"
        )


def _followed(request: Request) -> Sequence[Request]:
    """Those that it may share a step with though it reads what they encode; a mapper needs what it maps before."""
    return () if request.mapper else request.encoding.after()


def place_in_queue(queue: Sequence[Request], priority: int, most: int = MOST_OVERTAKEN) -> int:
    """Where a new request goes: behind all of its priority or a higher one, and whoever was overtaken often enough."""
    at = len(queue)
    while at and queue[at - 1].priority < priority and queue[at - 1].overtaken < most:
        at -= 1
    return at


class Completion:
    """Ends requests. Whatever fails in that fails this request alone, and never raises. Used under the engine's lock.

    Args:
        pool: Where their KV is.
        counters: Counts them.
        emit: Told of them.
        ended: Notified of them.
    """

    def __init__(
        self, pool: KVPool, counters: PerTenantCounters[Counters], emit: EventSink, ended: threading.Condition
    ) -> None:
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
        number, charges = request.number, request.charges
        self._emit(RequestFinished(now, number, outcome, tokens_reused=reused, tokens_outside_view=beyond, **charges))


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
    if isinstance(cause, KVMemoryError | CapacityError | ConstraintError):
        return cause
    error = EngineFailedError(f"a step of the engine failed: {error_text(cause)}")
    error.__cause__ = cause
    return error


def resolve(request: Request, error: ChoreoError | None) -> None:
    """Tell everyone who waits for a request that it ended without a result."""
    for future in request.futures:
        if future.set_running_or_notify_cancel() and error is not None:
            future.set_exception(error)
