"""Turns calls into requests and finished requests into messages."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

from choreo_agents.attention.folded import FoldedBackend
from choreo_agents.engine.calls import Content, Decode, Prefill, Usage
from choreo_agents.engine.ledger import Ledger, Message
from choreo_agents.engine.methods import Encoding, Job, make_method
from choreo_agents.engine.placement import place
from choreo_agents.engine.scope import Scope
from choreo_agents.engine.stats import EngineStats
from choreo_agents.errors import ContextLengthError, InvalidRequestError, KVBudgetError
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.loop import EngineLoop
from choreo_agents.runtime.request import Binding, Decoding, Request
from choreo_agents.runtime.scheduler import Limits
from choreo_agents.sampling import Sampling, TokenSampler
from choreo_agents.tracing import EventSink

Answer = Future[MessageHandle]
_REMEMBERED_CALLS = 65_536


@dataclass(frozen=True)
class Settings:
    """How an engine runs; see `Engine.load`."""

    method: str
    kv_budget_bytes: int
    step_tokens: int
    seed: int
    salt: bytes
    sink: EventSink


@dataclass(eq=False)
class _Source:
    """Where a request's result goes: see `RequestSource`."""

    core: EngineCore
    job: Job
    encoding: Encoding
    encodes_end: bool
    author: str | None
    role: str | None
    memo: str | None
    scopes: dict[Answer, Scope | None]
    prefill_id: str | None = None
    ready: Callable[[], bool] = field(init=False)
    prompt_tokens: Callable[[], int] = field(init=False)
    bind: Callable[[], Binding] = field(init=False)
    bound: Callable[[Segment], None] = field(init=False)
    unbind: Callable[[Binding], None] = field(init=False)

    def __post_init__(self) -> None:
        encoding = self.encoding
        self.ready, self.prompt_tokens, self.bind = encoding.ready, encoding.prompt_tokens, encoding.bind
        self.bound, self.unbind = encoding.bound, encoding.unbind

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
        self.ledger = Ledger(self.pool, adapter.fingerprint)
        self.method = make_method(settings.method, self.pool)
        executor = Executor(adapter, self.pool, FoldedBackend(adapter.rotation, adapter.geometry.dtype, adapter.device))
        self.loop = EngineLoop(executor, self.lock, Limits(settings.step_tokens), settings.sink, self.method)
        self._numbers = itertools.count()
        self._prefilling: dict[str, Request] = {}
        self._repeats: OrderedDict[str, int] = OrderedDict()
        self._found_reused = 0

    def submit_prefills(self, calls: Sequence[Prefill], scope: Scope | None) -> list[Answer]:
        """Validate all calls, then start them as one batch; nothing is done if one of them is wrong."""
        with self.lock:
            self.loop.require_open()
            jobs = [self._job(call.content, call, "nothing to prefill: the content is empty") for call in calls]
            for job in jobs:
                self._require_fit(job, 0)
            requests: list[Request] = []
            answers = [self._prefill(job, call, scope, requests) for job, call in zip(jobs, calls, strict=True)]
            self._submit(requests)
            return answers

    def submit_decodes(
        self, calls: Sequence[Decode], scope: Scope | None, on_token: Callable[[int], None] | None = None
    ) -> list[Answer]:
        """The same for decodes. `on_token` is called on the engine's thread and must not raise."""
        with self.lock:
            self.loop.require_open()
            empty = "the header is empty: the first token is sampled from what its last token encodes"
            jobs = [self._job(call.header, call, empty) for call in calls]
            decodings = [self._decoding(job, call) for job, call in zip(jobs, calls, strict=True)]
            for job, decoding in zip(jobs, decodings, strict=True):
                self._require_fit(job, decoding.longest)
            requests: list[Request] = []
            answers = []
            for job, call, decoding in zip(jobs, calls, decodings, strict=True):
                answers.append(self._decode(job, call, decoding, scope, requests, on_token))
            self._submit(requests)
            return answers

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        if not isinstance(handle, MessageHandle):
            raise InvalidRequestError(f"expected a MessageHandle, not {handle!r}: use MessageHandle.model_validate")
        with self.lock:
            return self.ledger.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None) -> None:
        """Drop one lease."""
        with self.lock:
            self.ledger.release(self.find(handle))
            if scope is not None:
                scope.forget(handle.id)

    def close_scope(self, scope: Scope) -> None:
        """Drop all leases that a scope counts, and any that its calls take later."""
        with self.lock:
            scope.closed = True
            for held, count in scope.leases.items():
                for _ in range(count):
                    message = self.ledger.get(held)
                    assert message is not None
                    self.ledger.release(message)
            scope.leases.clear()

    def stats(self) -> EngineStats:
        with self.lock:
            messages = self.ledger.messages()
            counters = asdict(self.loop.counters)
            counters["tokens_reused"] += self._found_reused
            return EngineStats(
                **counters,
                unfinished=self.loop.unfinished(),
                messages=len(messages),
                leases=sum(message.leases for message in messages),
                kv_bytes=self.pool.used_bytes,
                kv_budget_bytes=self.settings.kv_budget_bytes,
            )

    def check(self) -> None:
        """Assert all invariants of memory and bookkeeping."""
        with self.lock:
            self.pool.check()
            self.ledger.check()
            self.method.check()
            if not self.loop.unfinished() and self.method.keeps_kv:
                owned = sum(message.segment is not None for message in self.ledger.messages())
                assert self.pool.live_segments() == owned, "a segment outlived its message"

    def finish(self, source: _Source, request: Request) -> MessageHandle:
        """Make a message of a finished request, with a lease for everyone who waits for it."""
        assert request.binding is not None
        segment = source.encoding.close(request)
        tokens = source.job.tokens + tuple(request.tokens[len(request.binding.prompt) :])
        if source.prefill_id is not None:
            del self._prefilling[source.prefill_id]
        now = time.perf_counter()
        ttft = None if request.first_token_s is None else request.first_token_s - request.submitted_s
        usage = Usage(request.encoded, request.reused, ttft, now - request.submitted_s)
        message = self._message(source.job, tokens, source.author, source.role, usage)
        message = self.ledger.enter(message, segment)
        for answer in request.futures:
            scope = source.scopes[answer]
            if scope is None or not scope.closed:
                self.ledger.lease(message, scope)
        self.ledger.drop_if_unleased(message)
        if source.memo is not None and message.leases:
            self.ledger.memoise(source.memo, message)
        return message.handle

    def abandon(self, source: _Source, request: Request) -> None:
        """Give back all that an unfinished request holds."""
        if source.prefill_id is not None:
            del self._prefilling[source.prefill_id]
        segment = source.encoding.close(request)
        if segment is not None:
            self.pool.unpin(segment)

    def give_up(self, answer: Answer, scope: Scope | None) -> None:
        """Nobody waits for an answer any more: cancel it, or drop the lease that came with it."""
        if not answer.cancel():
            answer.add_done_callback(lambda done: self._return_lease(done, scope))

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        if not answer.cancelled() and answer.exception() is None and not (scope is not None and scope.closed):
            self.release(answer.result(), scope)

    def _job(self, content: Content, call: Prefill | Decode, if_empty: str) -> Job:
        tokens = self._tokens(content)
        if not tokens:
            raise InvalidRequestError(if_empty)
        parents = tuple(self.find(parent) for parent in call.parents)
        return Job(tokens, parents, place([len(parent.tokens) for parent in parents], call.offsets, call.new_offset))

    def _tokens(self, content: Content) -> tuple[int, ...]:
        tokens = tuple(self.model.encode(content) if isinstance(content, str) else content)
        size = self.model.adapter.vocabulary_size
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequestError(f"{token!r} is no token: ids run from 0 to {size - 1}")
        return tokens

    def _require_fit(self, job: Job, added: int) -> None:
        end, most = self.method.reach(job, added), self.model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the view and its new message reach position {end}, the model's context ends at {most}: "
                "show fewer or shorter messages, or lower max_tokens"
            )
        room = self.pool.rounded(self.method.room(job, added))
        if room > self.pool.total_tokens:
            raise KVBudgetError(
                f"the call needs KV memory for {room} tokens, the engine has {self.pool.total_tokens} in all: "
                "load it with a larger kv_budget_bytes, or lower max_tokens"
            )

    def _decoding(self, job: Job, call: Decode) -> Decoding:
        sampling, closing = call.sampling, self._tokens(call.closing)
        if sampling.forced is not None:
            self._tokens(sampling.forced)
        stops = sampling.stop_tokens
        if stops is None:
            stops = (*self.model.adapter.end_tokens, *closing[:1])
        seed = self._seed(job, sampling) if sampling.seed is None else sampling.seed
        return Decoding(sampling, TokenSampler(sampling, seed), frozenset(stops), closing)

    def _seed(self, job: Job, sampling: Sampling) -> int:
        """Different for each repetition of a call, the same in each run of a program."""
        call = f"{self._id(job, job.tokens)} {sampling.model_dump_json()}"
        repeat = self._repeats.pop(call, 0)
        self._repeats[call] = repeat + 1
        while len(self._repeats) > _REMEMBERED_CALLS:
            self._repeats.popitem(last=False)
        digest = hashlib.sha256(f"{self.settings.seed} {repeat} {call}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _prefill(self, job: Job, call: Prefill, scope: Scope | None, requests: list[Request]) -> Answer:
        identity = self._id(job, job.tokens)
        known = self.ledger.get(identity)
        if known is None and not self.method.keeps_kv:
            usage = Usage(0, 0, None, 0.0)
            known = self.ledger.enter(self._message(job, job.tokens, call.author, call.role, usage), None)
            return self._answered(known, scope)
        if known is not None:
            if self.method.keeps_kv:
                self._found_reused += len(job.tokens)
            return self._answered(known, scope)
        answer: Answer = Future()
        running = self._prefilling.get(identity)
        if running is not None:
            assert isinstance(running.source, _Source)
            running.futures.append(answer)
            running.source.scopes[answer] = scope
            self._found_reused += len(job.tokens)
            return answer
        source = self._source(job, call, {answer: scope}, prefill_id=identity)
        request = Request(next(self._numbers), source, None, call.author, [answer])
        self._prefilling[identity] = request
        requests.append(request)
        return answer

    def _decode(
        self,
        job: Job,
        call: Decode,
        decoding: Decoding,
        scope: Scope | None,
        requests: list[Request],
        on_token: Callable[[int], None] | None,
    ) -> Answer:
        memo = None
        if call.memo is not None:
            closing = ",".join(map(str, decoding.closing))
            memo = f"{call.memo} {self._id(job, job.tokens)} {call.sampling.model_dump_json()} {closing}"
            known = self.ledger.recall(memo)
            if known is not None:
                for token in known.tokens[len(job.tokens) :] if on_token is not None else ():
                    assert on_token is not None
                    on_token(token)
                return self._answered(known, scope)
        answer: Answer = Future()
        source = self._source(job, call, {answer: scope}, memo=memo)
        requests.append(Request(next(self._numbers), source, decoding, call.author, [answer], on_token))
        return answer

    def _source(
        self,
        job: Job,
        call: Prefill | Decode,
        scopes: dict[Answer, Scope | None],
        *,
        memo: str | None = None,
        prefill_id: str | None = None,
    ) -> _Source:
        role = call.role if isinstance(call, Prefill) else "assistant"
        encoding = self.method.encoding(job)
        return _Source(self, job, encoding, self.method.keeps_kv, call.author, role, memo, scopes, prefill_id)

    def _submit(self, requests: list[Request]) -> None:
        if requests:
            self.loop.submit(requests)

    def _answered(self, message: Message, scope: Scope | None) -> Answer:
        self.ledger.lease(message, scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer

    def _id(self, job: Job, tokens: tuple[int, ...]) -> str:
        parents = [parent.handle.id for parent in job.parents]
        fingerprint = self.model.adapter.fingerprint
        key = hmac.new(b"choreo", self.settings.salt, hashlib.sha256).digest()
        return message_id(key, fingerprint, tokens, parents, job.placement.relative())

    def _message(
        self, job: Job, tokens: tuple[int, ...], author: str | None, role: str | None, usage: Usage
    ) -> Message:
        handle = MessageHandle(
            id=self._id(job, tokens), model=self.model.adapter.fingerprint, length=len(tokens)
        )
        return Message(handle, tokens, job.parents, job.placement.relative(), author, role, usage)
