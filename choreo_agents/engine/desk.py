"""A tenant's desk: takes its calls, and hands finished requests back as messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakMethod

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.calls import Decode, Prefill, Usage
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.gate import Gate
from choreo_agents.engine.intake import Intake, ReadCall
from choreo_agents.engine.joining import Joining
from choreo_agents.engine.labels import Label
from choreo_agents.engine.ledger import Message
from choreo_agents.engine.methods import Job, arrivals_of
from choreo_agents.engine.pending import Answer, Pending
from choreo_agents.engine.scope import Scope
from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Chosen

OnToken = Callable[[Chosen], None]
T = TypeVar("T")


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
        self.core = core
        self.intake = Intake(core, salt)
        self.tenant = self.intake.tenant
        self._prefilling: dict[str, Request] = {}
        self._memoising: dict[str, Request] = {}
        self.gate: Gate | None = None
        """Keeps the rate at which its calls start."""
        self.closed = False
        """Whether the tenancy has ended."""
        self._kept: dict[Callable[..., object], Any] = {}
        """What keeps messages for it, by what made it."""
        core.on_restart.append(WeakMethod(self._forget_running))

    def limit(self, starts_per_s: float) -> None:
        """Let so many of the tenant's calls start in a second, from now on, whoever makes them."""
        with self.core.lock:
            if self.gate is None:
                self.gate = self.core.gate(starts_per_s)
            else:
                self.gate.set_rate(starts_per_s)

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended, or the engine was closed."""
        self.require_tenancy()
        self.core.loop.require_open()

    def close(self) -> None:
        """End the tenancy: fail its unfinished calls, and drop its leases and all that only it holds."""
        core = self.core
        with core.lock:
            if self.closed:
                return
            self.closed = True
            if self.gate is not None:
                core.close_gate(self.gate)
        core.loop.drop_tenant(self.tenant)
        with core.lock:
            self._kept.clear()
            core.ledger.drop_tenant(self.tenant)
            core.method.drop_tenant(self.tenant)
            core.adapters.drop_tenant(self.tenant)

    def load_adapter(self, folder: str | Path, name: str | None) -> str:
        """See `Engine.load_adapter`."""
        self.require_tenancy()
        loaded = read_loaded(self.core.model.adapter, folder, self.core.settings.memory.mapped_storage)
        with self.core.lock:
            self.require_tenancy()
            return self.core.adapters.add(loaded, name, self.tenant)

    def adapters(self) -> tuple[str, ...]:
        """The names that its calls can use."""
        with self.core.lock:
            self.require_tenancy()
            return self.core.adapters.names(self.tenant)

    def keeper(self, make: Callable[..., T], *args: Any) -> T:
        """What `make` makes, once: see `KVTransfer.keeper`."""
        with self.core.lock:
            self.require_tenancy()
            if make not in self._kept:
                self._kept[make] = make(*args)
            kept: T = self._kept[make]
            return kept

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
        with self.core.lock:
            self.require_open()
            jobs = [self.intake.job(call) for call in read]
            batch = _Batch(scope, time.perf_counter() if started is None else started)
            with _whole(batch):
                answers = [self._prefill(job, call, batch) for job, call in zip(jobs, read, strict=True)]
                self.core.loop.submit(batch.requests)
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
        with self.core.lock:
            self.require_open()
            jobs = [self.intake.job(call) for call in read]
            batch = _Batch(scope, time.perf_counter() if started is None else started, on_token)
            with _whole(batch):
                answers = [self._decode(job, call, batch) for job, call in zip(jobs, read, strict=True)]
                self.core.loop.submit(batch.requests)
            return answers

    def joining(self) -> Joining:
        """What brings messages into the view of one of its decodes while that is under way."""
        self.require_tenancy()
        return Joining(self.intake, self.core.lock, self.intake.arriving)

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        with self.core.lock:
            self.require_tenancy()
            return self.intake.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None, *, spare_only: bool) -> None:
        """Drop one lease; with `spare_only`, unless it is the last that does not end with another's scope."""
        with self.core.lock:
            message = self.find(handle)
            if not spare_only or message.leases_within(scope) > 1:
                self.core.ledger.release(message, scope)

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

    def require_tenancy(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended."""
        if self.closed:
            raise EngineClosedError("this tenancy was closed: begin another with tenant()")

    def _forget_running(self) -> None:
        """The engine starts again: no request is under way any more."""
        self._prefilling.clear()
        self._memoising.clear()

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        given = not answer.cancelled() and answer.exception() is None
        if given and not self.closed and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, spare_only=False)

    def _prefill(self, job: Job, read: ReadCall, batch: _Batch) -> Answer:
        core, call = self.core, read.call
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
            pending = Pending(core, self.intake, job, encodes_end=True, running=self._prefilling, key=identity)
            request = pending.request(call.author, call.role)
            request.label = job.label(call.author, call.role, self.label_of(read).source)
            self._prefilling[identity] = request
            batch.requests.append(request)
        return self._joined(request, read, batch)

    def _decode(self, job: Job, read: ReadCall, batch: _Batch) -> Answer:
        core, call = self.core, read.call
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
            pending = Pending(core, self.intake, job, core.method.keeps_kv, memo, self._memoising, memo)
            request = pending.request(call.author, "assistant", self.intake.decoding(job, read))
            request.label = job.label(call.author, f"decode {read.sample}")
            if memo is not None:
                self._memoising[memo] = request
            batch.requests.append(request)
        if call.joining is not None:
            call.joining.begin(call, arrivals_of(request.encoding))
        return self._joined(request, read, batch)

    def _joined(self, request: Request, read: ReadCall, batch: _Batch) -> Answer:
        """Wait for a request, that others may wait for already."""
        assert isinstance(request.owner, Pending)
        if request in batch.requests:
            request.tenant = self.intake.tenant
            request.priority = max(request.priority, read.call.priority) if request.futures else read.call.priority
        else:
            self.core.loop.hurry(request, read.call.priority)
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
            self.core.ledger.lease(message, scope)
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


@contextmanager
def _whole(batch: _Batch) -> Iterator[None]:
    """Give back what a batch has taken, if it cannot be submitted whole: nobody may join what will never run."""
    try:
        yield
    except BaseException:
        for request in batch.requests:
            request.owner.abandon(request)
        raise
