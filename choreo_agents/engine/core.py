"""Turns calls into requests and finished requests into messages."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from choreo_agents.attention.folded import FoldedBackend
from choreo_agents.engine.calls import Decode, Prefill, Usage
from choreo_agents.engine.intake import Intake, ReadCall
from choreo_agents.engine.ledger import Ledger, Message
from choreo_agents.engine.methods import Job, MethodName, make_method
from choreo_agents.engine.restoring import Restorer
from choreo_agents.engine.scope import Scope
from choreo_agents.engine.stats import EngineStats
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.memory import Memory
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.tiers import DiskTier, HostTier
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.loop import EngineLoop
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Limits
from choreo_agents.tracing import EventSink

Answer = Future[MessageHandle]


class Settings(BaseModel):
    """How an engine runs; see `Engine.load`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: MethodName
    kv_budget_bytes: int = Field(ge=1)
    host_bytes: int = Field(ge=0)
    disk: Path | None
    disk_bytes: int = Field(ge=1)
    step_tokens: int = Field(ge=1)
    seed: int
    salt: str
    sink: EventSink


@dataclass(eq=False)
class _Order:
    """Who waits for a request, and under which leases: see `Owner`."""

    core: EngineCore
    job: Job
    scopes: dict[Answer, Scope | None]
    encodes_end: bool
    memo: str | None = None
    running: dict[str, Request] = field(default_factory=dict)
    """Where the same call finds this request while it is under way, by `key`."""
    key: str | None = None

    def forget(self) -> None:
        """It is no longer under way."""
        if self.key is not None:
            del self.running[self.key]

    def finish(self, request: Request) -> MessageHandle:
        return self.core.finish(self, request)

    def abandon(self, request: Request) -> None:
        self.core.abandon(self, request)


class EngineCore:
    """The engine behind its sync and async faces. Every public method may be called from any thread."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        adapter = model.adapter
        self.model = model
        self.settings = settings
        self.lock = threading.RLock()
        self.pool = KVPool(adapter.geometry, settings.kv_budget_bytes, adapter.device)
        disk = DiskTier(settings.disk, settings.disk_bytes, adapter.fingerprint) if settings.disk else None
        self.memory = Memory(self.pool, HostTier(settings.host_bytes), disk)
        self.ledger = Ledger(self.memory, adapter.fingerprint)
        self._numbers = itertools.count()
        self.method = make_method(settings.method, Restorer(self.ledger, self.memory, self._numbers.__next__))
        executor = Executor(adapter, self.pool, FoldedBackend(adapter.geometry.dtype, adapter.device))
        self.loop = EngineLoop(executor, self.lock, Limits(settings.step_tokens), settings.sink, self.method)
        self._intake = Intake(
            model, self.ledger, self.pool, self.method, seed=settings.seed, salt=settings.salt.encode()
        )
        self.memory.wake = self.loop.wake
        self._prefilling: dict[str, Request] = {}
        self._memoising: dict[str, Request] = {}
        # Ends the thread when the engine is dropped without being closed, and before the interpreter exits.
        weakref.finalize(self, _close, self.loop, self.memory)
        self._found_reused = 0

    def submit_prefills(self, calls: Sequence[Prefill], scope: Scope | None) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong."""
        read = [self._intake.read(call) for call in calls]
        with self.lock:
            self.loop.require_open()
            jobs = [self._intake.job(call) for call in read]
            requests: list[Request] = []
            answers = [self._prefill(job, call, scope, requests) for job, call in zip(jobs, calls, strict=True)]
            self._submit(requests)
            return answers

    def submit_decodes(
        self, calls: Sequence[Decode], scope: Scope | None, on_token: Callable[[int], None] | None = None
    ) -> list[Answer]:
        """The same for decodes. `on_token` is called on the engine's thread and must not raise."""
        read = [self._intake.read(call) for call in calls]
        with self.lock:
            self.loop.require_open()
            jobs = [self._intake.job(call) for call in read]
            requests: list[Request] = []
            answers = [self._decode(job, call, scope, requests, on_token) for job, call in zip(jobs, read, strict=True)]
            self._submit(requests)
            return answers

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        with self.lock:
            return self.ledger.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None, *, spare_only: bool) -> None:
        """Drop one lease; with `spare_only`, unless it is the last that does not end with another's scope."""
        with self.lock:
            message = self.ledger.find(handle)
            if not spare_only or message.leases_within(scope) > 1:
                self.ledger.release(message, scope)

    def close_scope(self, scope: Scope) -> None:
        """Drop all leases that a scope counts; calls still under way in it will take none."""
        with self.lock:
            scope.closed = True
            self.ledger.close(scope)

    def close(self) -> None:
        """Fail what is unfinished, and end the engine's threads."""
        _close(self.loop, self.memory)

    def pin(self, handle: MessageHandle, by: int) -> None:
        """Keep a message in the pool, once it is there, until it was unpinned as often."""
        with self.lock:
            holding = self.ledger.find(handle).holding
            if holding is not None:
                if holding.pins + by < 0:
                    raise InvalidRequestError(f"handle {handle.id!r} was unpinned more often than pinned")
                holding.pins += by

    def park(self, scope: Scope | None) -> None:
        """Take what only a scope leases, or everything, out of the pool, unless it is pinned or being read."""
        with self.lock:
            messages = [m for m in self.ledger.messages() if scope is None or m.leased_only_within(scope)]
            self.memory.park(m.holding for m in messages if m.holding is not None)

    def stats(self) -> EngineStats:
        with self.lock:
            messages = self.ledger.messages()
            tiers = self.memory.bytes_by_tier()
            counters = asdict(self.loop.counters)
            counters["tokens_reused"] += self._found_reused
            return EngineStats(
                **counters,
                unfinished=self.loop.unfinished(),
                messages=len(messages),
                leases=sum(message.leases for message in messages),
                **asdict(self.memory.movements),
                kv_bytes=self.pool.used_bytes,
                host_bytes=tiers["host"],
                disk_bytes=tiers["disk"],
                kv_budget_bytes=self.settings.kv_budget_bytes,
            )

    def check(self) -> None:
        """Assert all invariants of memory and bookkeeping."""
        with self.lock:
            self.pool.check()
            self.ledger.check()
            self.method.check()
            if not self.loop.unfinished() and self.method.keeps_kv:
                holdings = [message.holding for message in self.ledger.messages()]
                owned = sum(holding is not None and holding.segment is not None for holding in holdings)
                assert self.pool.live_segments() == owned, "a segment outlived its message"

    def finish(self, order: _Order, request: Request) -> MessageHandle:
        """Make a message of a finished request, with a lease for everyone who waits for it."""
        assert request.binding is not None
        segment = request.encoding.close(request)
        order.forget()
        tokens = order.job.tokens + tuple(request.tokens[len(request.binding.prompt) :])
        ttft = None if request.first_token_s is None else request.first_token_s - request.submitted_s
        usage = Usage(request.encoded, request.reused, ttft, time.perf_counter() - request.submitted_s)
        message = self.ledger.enter(self._message(order.job, tokens, request.author, request.role, usage), segment)
        self._found_reused += len(tokens) * max(0, len(request.futures) - 1)
        for answer in request.futures:
            scope = order.scopes[answer]
            if scope is None or not scope.closed:
                self.ledger.lease(message, scope)
        self.ledger.drop_if_unleased(message)
        if order.memo is not None and message.leases:
            self.ledger.memoise(order.memo, message)
        return message.handle

    def abandon(self, order: _Order, request: Request) -> None:
        """Give back all that an unfinished request holds."""
        order.forget()
        segment = request.encoding.close(request)
        if segment is not None:
            self.pool.unpin(segment)

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

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        if not answer.cancelled() and answer.exception() is None and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, spare_only=False)

    def _prefill(self, job: Job, call: Prefill, scope: Scope | None, requests: list[Request]) -> Answer:
        identity = self._intake.identity(job, job.tokens)
        known = self.ledger.get(identity)
        if known is not None:
            if self.method.keeps_kv:
                self._found_reused += len(job.tokens)
            return self._answered(known, scope)
        if not self.method.keeps_kv:
            message = self._message(job, job.tokens, call.author, call.role, Usage(0, 0, None, 0.0))
            return self._answered(self.ledger.enter(message, None), scope)
        running = self._prefilling.get(identity)
        if running is not None:
            return self._joined(running, scope)
        answer: Answer = Future()
        order = _Order(self, job, {answer: scope}, encodes_end=True, running=self._prefilling, key=identity)
        encoding = self.method.encoding(job)
        request = Request(next(self._numbers), encoding, order, None, call.author, call.role, [answer])
        self._prefilling[identity] = request
        requests.append(request)
        return answer

    def _decode(
        self,
        job: Job,
        read: ReadCall,
        scope: Scope | None,
        requests: list[Request],
        on_token: Callable[[int], None] | None,
    ) -> Answer:
        memo = self._intake.memo(job, read)
        known = None if memo is None else self.ledger.recall(memo)
        if known is not None:
            for token in known.tokens[len(job.tokens) :] if on_token is not None else ():
                assert on_token is not None
                on_token(token)
            return self._answered(known, scope)
        running = None if memo is None else self._memoising.get(memo)
        if running is not None:
            return self._joined(running, scope, on_token)
        answer: Answer = Future()
        order = _Order(self, job, {answer: scope}, self.method.keeps_kv, memo, self._memoising, memo)
        encoding, decoding = self.method.encoding(job), self._intake.decoding(job, read)
        author = read.call.author
        request = Request(next(self._numbers), encoding, order, decoding, author, "assistant", [answer])
        if on_token is not None:
            request.listeners.append(on_token)
        if memo is not None:
            self._memoising[memo] = request
        requests.append(request)
        return answer

    def _joined(self, running: Request, scope: Scope | None, on_token: Callable[[int], None] | None = None) -> Answer:
        """Wait for a request that is under way already."""
        assert isinstance(running.owner, _Order)
        answer: Answer = Future()
        running.futures.append(answer)
        running.owner.scopes[answer] = scope
        if on_token is not None:
            for token in running.sampled:
                on_token(token)
            running.listeners.append(on_token)
        return answer

    def _submit(self, requests: list[Request]) -> None:
        if requests:
            self.loop.submit(requests)

    def _answered(self, message: Message, scope: Scope | None) -> Answer:
        # A stream may be read after the scope that it was asked for in has ended.
        self.ledger.lease(message, None if scope is not None and scope.closed else scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer

    def _message(
        self, job: Job, tokens: tuple[int, ...], author: str | None, role: str | None, usage: Usage
    ) -> Message:
        handle = MessageHandle(
            id=self._intake.identity(job, tokens), model=self.model.adapter.fingerprint, length=len(tokens)
        )
        return Message(handle, tokens, job.parents, job.placement.relative(), author, role, usage)


def _close(loop: EngineLoop, memory: Memory) -> None:
    loop.close()
    memory.close()
