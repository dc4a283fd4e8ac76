"""A tenant's desk: takes its calls, and hands finished requests back as messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

from choreo_agents.engine.calls import Decode, Prefill, Usage
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.gate import Gate
from choreo_agents.engine.intake import Intake, ReadCall
from choreo_agents.engine.joining import Joining
from choreo_agents.engine.ledger import Message
from choreo_agents.engine.lineage import Label, LineageReport, trace
from choreo_agents.engine.memory_map import MemoryMap
from choreo_agents.engine.methods import Job, arrivals_of, grown
from choreo_agents.engine.scope import Scope
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.request import Decoding, Request
from choreo_agents.sampling import Chosen

Answer = Future[MessageHandle]
OnToken = Callable[[Chosen], None]


@dataclass(eq=False)
class _Order:
    """Who waits for a request, and under which leases: see `Owner`."""

    desk: Desk
    job: Job
    scopes: dict[Answer, Scope | None]
    encodes_end: bool
    memo: str | None = None
    running: dict[str, Request] = field(default_factory=dict)
    """Where the same call finds this request while it is under way, by `key`."""
    key: str | None = None
    labels: list[Label] = field(default_factory=list)
    """What those who wait say about the message."""
    prefills: set[Answer] = field(default_factory=set)
    """Those who asked for it to be encoded now: all but one of them have found it."""

    def forget(self) -> None:
        """It is no longer under way."""
        if self.key is not None:
            self.running.pop(self.key, None)

    def found(self, request: Request) -> int:
        """How many of those who wait still have found what another had asked for."""
        return max(0, len(self.prefills.intersection(request.futures)) - 1)

    def finish(self, request: Request) -> MessageHandle:
        return self.desk.finish(self, request)

    def abandon(self, request: Request) -> None:
        self.desk.abandon(self, request)


@dataclass
class _Batch:
    """Calls that come together."""

    scope: Scope | None
    """Which takes the leases."""
    started: float
    """When they were made, as `time.perf_counter` counts."""
    on_token: OnToken | None = None
    requests: list[Request] = field(default_factory=list)
    """What has to be done for them."""


class Desk:
    """The calls of one tenant: no other's message is found here, nor found again as one of its own.

    Every public method may be called from any thread.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self._core = core
        self.intake = Intake(core, salt)
        self.tenant = self.intake.tenant
        self._prefilling: dict[str, Request] = {}
        self._memoising: dict[str, Request] = {}
        self.gate: Gate | None = None
        """Keeps the rate at which its calls start."""
        core.on_restart.append(WeakMethod(self._forget_running))

    def limit(self, starts_per_s: float) -> None:
        """Let so many of the tenant's calls start in a second, from now on, whoever makes them."""
        with self._core.lock:
            if self.gate is None:
                self.gate = self._core.gate(starts_per_s)
            else:
                self.gate.set_rate(starts_per_s)

    @property
    def core(self) -> EngineCore:
        """The engine that serves it."""
        return self._core

    def submit_prefills(
        self, calls: Sequence[Prefill], scope: Scope | None, started: float | None = None
    ) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong.

        Args:
            calls: What to encode.
            scope: Which takes the leases.
            started: When the calls were made, as `time.perf_counter` counts; None: now.
        """
        read = [self.intake.read(call) for call in calls]
        with self._core.lock:
            self._core.loop.require_open()
            jobs = [self.intake.job(call) for call in read]
            batch = _Batch(scope, time.perf_counter() if started is None else started)
            with _whole(batch):
                answers = [self._prefill(job, call, batch) for job, call in zip(jobs, read, strict=True)]
                self._core.loop.submit(batch.requests)
            return answers

    def submit_decodes(
        self,
        calls: Sequence[Decode],
        scope: Scope | None,
        started: float | None = None,
        on_token: OnToken | None = None,
    ) -> list[Answer]:
        """The same for decodes, with as many answers to each as its sampling asks for.

        `on_token` is called on the engine's thread and must not raise.
        """
        read = [again for call in calls for again in self.intake.read_samples(call)]
        with self._core.lock:
            self._core.loop.require_open()
            jobs = [self.intake.job(call) for call in read]
            batch = _Batch(scope, time.perf_counter() if started is None else started, on_token)
            with _whole(batch):
                answers = [self._decode(job, call, batch) for job, call in zip(jobs, read, strict=True)]
                self._core.loop.submit(batch.requests)
            return answers

    def joining(self) -> Joining:
        """What brings messages into the view of one of its decodes while that is under way."""
        return Joining(self.intake, self._core.lock, self.intake.arriving)

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        with self._core.lock:
            return self.intake.find(handle)

    def audit(self, handles: Sequence[MessageHandle]) -> LineageReport:
        """What reached these messages, through which channel."""
        with self._core.lock:
            keeps_kv = self._core.method.keeps_kv
            return LineageReport(tuple(trace(self.intake.find(handle), keeps_kv) for handle in handles))

    def release(self, handle: MessageHandle, scope: Scope | None, *, spare_only: bool) -> None:
        """Drop one lease; with `spare_only`, unless it is the last that does not end with another's scope."""
        with self._core.lock:
            message = self.intake.find(handle)
            if not spare_only or message.leases_within(scope) > 1:
                self._core.ledger.release(message, scope)

    def pin(self, handle: MessageHandle, by: int) -> None:
        """Keep a message in the pool, once it is there, until it was unpinned as often."""
        with self._core.lock:
            message = self.intake.find(handle)
            if self._core.method.keeps_kv:
                holding = self._core.ledger.place(message)
                if holding.pins + by < 0:
                    raise InvalidRequestError(f"handle {handle.id!r} was unpinned more often than pinned")
                holding.pins += by

    def park(self, scope: Scope | None) -> None:
        """Take what only a scope leases, or all that is the tenant's, out of the pool, unless it is kept there."""
        with self._core.lock:
            mine = [message for message in self._core.ledger.messages() if message.tenant == self.intake.tenant]
            parked = [m for m in mine if scope is None or m.leased_only_within(scope)]
            self._core.memory.park(m.holding for m in parked if m.holding is not None)

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which of the tenant's authors keep it there."""
        return self._core.memory_map(self.intake.tenant)

    def finish(self, order: _Order, request: Request) -> MessageHandle:
        """Make a message of a finished request, with a lease for everyone who waits for it."""
        segment = request.encoding.close(request)
        try:
            return self._enter(order, request, segment)
        except BaseException:
            if segment is not None and segment.pins:
                self._core.pool.unpin(segment)
            raise

    def _enter(self, order: _Order, request: Request, segment: Segment | None) -> MessageHandle:
        assert request.binding is not None
        ledger = self._core.ledger
        order.forget()
        tokens = order.job.tokens + tuple(request.tokens[len(request.binding.prompt) :])
        job = grown(order.job, request.encoding)
        message = self.intake.message(job, tokens, request.author, request.role, Usage.of(request))
        message.chosen, message.label, message.header = tuple(request.chosen), request.label, len(order.job.tokens)
        message = ledger.enter(message, segment)
        for label in order.labels:
            label.put_on(message)
        self._core.count_found(order.job.prompt_tokens() * order.found(request))
        for answer in request.futures:
            scope = order.scopes[answer]
            if scope is None or not scope.closed:
                ledger.lease(message, scope)
        ledger.drop_if_unleased(message)
        if order.memo is not None and message.leases:
            ledger.memoise(order.memo, message)
        return message.handle

    def abandon(self, order: _Order, request: Request) -> None:
        """Give back all that an unfinished request holds."""
        order.forget()
        segment = request.encoding.close(request)
        if segment is not None:
            self._core.pool.unpin(segment)

    @contextmanager
    def given_up_if_left(self, answers: Sequence[Answer], scope: Scope | None) -> Iterator[None]:
        """Cancel answers, or return the leases that came with them, if the block is left by an error."""
        try:
            yield
        except BaseException:
            for answer in answers:
                if not answer.cancel():
                    answer.add_done_callback(lambda done: self._return_lease(done, scope))
            raise

    def _forget_running(self) -> None:
        """The engine starts again: no request is under way any more."""
        self._prefilling.clear()
        self._memoising.clear()

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        if not answer.cancelled() and answer.exception() is None and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, spare_only=False)

    def _prefill(self, job: Job, read: ReadCall, batch: _Batch) -> Answer:
        core, call = self._core, read.call
        assert isinstance(call, Prefill)
        identity = self.intake.identity(job, job.tokens)
        known = core.ledger.get(identity)
        if known is not None and (call.lazy or known.promise is None):
            if core.method.keeps_kv and not call.lazy:
                core.count_found(job.prompt_tokens())
            return self._answered(known, read, batch.scope)
        request = self._prefilling.get(identity)
        if not core.method.keeps_kv or (request is None and call.lazy and not job.mapper):
            made = job.parents[0] if job.mapper else _unencoded(self, job, read)
            return self._answered(made, read, batch.scope)
        if request is None:
            order = _Order(self, job, {}, encodes_end=True, running=self._prefilling, key=identity)
            request = _request(core, job, order, call.author, call.role)
            request.label = job.label(call.author, call.role, self.label_of(read).source)
            self._prefilling[identity] = request
            batch.requests.append(request)
        return self._joined(request, read, batch)

    def _decode(self, job: Job, read: ReadCall, batch: _Batch) -> Answer:
        core, call = self._core, read.call
        assert isinstance(call, Decode)
        memo = self.intake.memo(job, read)
        known = None if memo is None else core.ledger.recall(memo)
        if known is not None:
            for chosen in known.chosen if batch.on_token is not None else ():
                assert batch.on_token is not None
                batch.on_token(chosen)
            if call.joining is not None:
                call.joining.begin(call, None)
            return self._answered(known, read, batch.scope)
        request = None if memo is None else self._memoising.get(memo)
        if request is None:
            order = _Order(self, job, {}, core.method.keeps_kv, memo, self._memoising, memo)
            decoding = self.intake.decoding(job, read)
            request = _request(core, job, order, call.author, "assistant", decoding)
            request.label = job.label(call.author, f"decode {read.sample}")
            if memo is not None:
                self._memoising[memo] = request
            batch.requests.append(request)
        if call.joining is not None:
            call.joining.begin(call, arrivals_of(request.encoding))
        return self._joined(request, read, batch)

    def _joined(self, request: Request, read: ReadCall, batch: _Batch) -> Answer:
        """Wait for a request, that others may wait for already."""
        assert isinstance(request.owner, _Order)
        if request in batch.requests:
            request.tenant = self.intake.tenant
            request.priority = max(request.priority, read.call.priority) if request.futures else read.call.priority
        else:
            self._core.loop.hurry(request, read.call.priority)
        answer: Answer = Future()
        request.futures.append(answer)
        request.owner.scopes[answer] = batch.scope
        if isinstance(read.call, Prefill) and not read.call.lazy:
            request.owner.prefills.add(answer)
        request.owner.labels.append(self.label_of(read))
        if read.call.timeout_s is not None:
            request.deadlines[answer] = batch.started + read.call.timeout_s
        if batch.on_token is not None:
            for chosen in request.chosen:
                batch.on_token(chosen)
            request.listeners.append(batch.on_token)
        return answer

    def label_of(self, read: ReadCall) -> Label:
        source = read.call.source if isinstance(read.call, Prefill) else None
        return Label(read.call.author, read.call.confidential, None if source is None else self.intake.find(source))

    def _answered(self, message: Message, read: ReadCall, scope: Scope | None) -> Answer:
        self.label_of(read).put_on(message)
        if scope is None or not scope.closed:
            self._core.ledger.lease(message, scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer


def _unencoded(desk: Desk, job: Job, read: ReadCall) -> Message:
    """A message that stays text, or that whoever reads it first has encoded."""
    call = read.call
    assert isinstance(call, Prefill)
    message = desk.intake.message(job, job.tokens, call.author, call.role, Usage(0, 0, None, 0.0))
    if desk.core.method.keeps_kv:
        message.label = job.label(call.author, call.role, desk.label_of(read).source)
        message.header = len(job.tokens)
        message.promise = desk.core.next_number()
    return desk.core.ledger.enter(message, None)


def _request(
    core: EngineCore,
    job: Job,
    order: _Order,
    author: str | None,
    role: str | None,
    decoding: Decoding | None = None,
) -> Request:
    """A new request, which wants what it reads from now on."""
    request = Request(core.next_number(), core.method.encoding(job), order, decoding, author, role, [])
    request.adapter, request.mapper = job.adapter, job.mapper
    return request


@contextmanager
def _whole(batch: _Batch) -> Iterator[None]:
    """Give back what a batch has taken, if it cannot be submitted whole: nobody may join what will never run."""
    try:
        yield
    except BaseException:
        for request in batch.requests:
            request.owner.abandon(request)
        raise
