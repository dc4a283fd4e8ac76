"""Calls of one tenant, as generators that yield what to wait for, driven by a sync and an async driver.

A call is answered by a known message, joins a request that is running, or gets a new request.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from choreo_agents.engine.calls import Calls, Decode, Prefill, StreamedToken
from choreo_agents.engine.constraints import PhaseTexts, answer_at, answer_of
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message, MessageIds, Scope, Thought, Usage, thinker
from choreo_agents.engine.persistent_kv import persistent_kv_of
from choreo_agents.engine.rate_limit import RateLimiter
from choreo_agents.engine.request_builder import Answer, OnToken, PlacedCall, ReadCall, RequestBuilder
from choreo_agents.errors import CutAnswerWarning, EngineClosedError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Sampling

T = TypeVar("T")
StreamedItem = StreamedToken | MessageHandle
_END = object()
LONG = 1 << 14
"""Characters from which a text is tokenized on another thread: about 15 ms."""


@dataclass(frozen=True)
class Await:
    """Futures to wait for."""

    futures: Sequence[Future[Any]]

    def wait(self) -> None:
        """Wait until all are done or the first has failed; the caller gets its error from the future."""
        with suppress(Exception):
            for future in self.futures:
                future.result()

    async def wait_async(self) -> None:
        """Wait likewise on an event loop. Cancelling the task cancels the futures."""
        if all(future.done() for future in self.futures):
            # Awaiting finished futures never yields, and would starve other tasks, timeouts and cancellation.
            await asyncio.sleep(0)
            return
        with suppress(Exception):
            for future in self.futures:
                await asyncio.wrap_future(future)


Steps = Generator[Await | T]
"""Generator that yields what to wait for and, in between, items for the caller."""
Plan = Callable[["Tenant"], Steps[T]]
"""Function that makes calls of a tenant, as steps whose last item is the result."""


def _results(futures: Sequence[Future[Any]]) -> Generator[Await, None, list[Any]]:
    """Wait for futures and return their results; raises their first error."""
    yield Await(futures)
    return [future.result() for future in futures]


class Tenant:
    """Calls of one tenant, which never find or share another tenant's messages.

    Every public method may be called from any thread.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self.core = core
        self.message_ids = MessageIds(salt, core.model.adapter.fingerprint, core.secret)
        self.name = self.message_ids.tenant
        """Name that does not reveal the salt."""
        self.builder = RequestBuilder(core, self.message_ids)
        self.scopes = object()
        """Key of its scopes in every context, unique as long as anything refers to it."""
        self.limiter = RateLimiter()
        """Limits the rate at which its calls start."""
        self.closing = self.closed = False
        """`closing` is True from the start of `close` on, `closed` once it has ended."""
        self.persistent_kv = persistent_kv_of(core, self.message_ids, self.builder.find)
        """Writer of KV that survives the engine; None if there is none."""
        self.keepers: dict[Callable[..., object], Any] = {}
        """Objects that keep messages for it, by the function that made them."""
        self.recorder: Any = None
        """Recorder of its runs, while there is one."""

    def run(self, plan: Plan[T]) -> T:
        """Run a plan's calls, and return its result."""
        with closing(_drive(plan(self))) as results:
            return next(results)

    async def arun(self, plan: Plan[T]) -> T:
        """Run a plan like `run`. Cancelling the awaiting task stops the requests and frees their memory."""
        async with aclosing(_adrive(plan(self))) as results:
            return await anext(results)

    def stream(self, call: Decode, *, tokens: bool) -> Generator[StreamedItem]:
        """Yield each token of a decode as it is sampled, and the handle last; without `tokens`, the handle alone.

        Closing it early cancels the decode.
        """
        return _drive(self._stream(call, self.scope(), tokens=tokens))

    def astream(self, call: Decode, *, tokens: bool) -> AsyncGenerator[StreamedItem]:
        """Stream like `stream`, on an event loop."""
        return _adrive(self._stream(call, self.scope(), tokens=tokens))

    def run_batch(self, calls: Calls, scope: Scope | None) -> Generator[Await, None, list[MessageHandle]]:
        """Run a batch in a scope, which takes the leases, and return its handles."""
        began = time.perf_counter()
        read, answers = yield from self._begin(calls, scope, began)
        with self.cancel_on_error(answers, scope):
            handles = yield from self._end(read, answers, scope, began)
        self._warn_of_cuts(read, handles)
        return handles

    def _stream(self, call: Decode, scope: Scope | None, *, tokens: bool) -> Steps[StreamedItem]:
        """Yield the tokens of a decode as they are sampled, and its handle."""
        began, queue = time.perf_counter(), _StreamQueue()
        # With many calls at once, passing on tokens that nobody reads would take longer than small steps.
        read, answers = yield from self._begin([call], scope, began, queue.put if tokens else None)
        answers[0].add_done_callback(lambda _: queue.put(_END))
        texts = PhaseTexts(self.core.model, call.thinking)
        with self.cancel_on_error(answers, scope):
            while (chosen := (yield from _results([queue.next()]))[0]) is not _END:
                phase, text = texts.add(chosen.token)
                yield StreamedToken(chosen.token, text, chosen, phase)
            handles = yield from self._end(read, answers, scope, began)
        self._warn_of_cuts(read, handles)
        yield handles[0]

    def _begin(
        self, calls: Calls, scope: Scope | None, began: float, on_token: OnToken | None = None
    ) -> Generator[Await, None, tuple[list[ReadCall], list[Answer]]]:
        """Start calls that were made at a time, as soon as they may start."""
        self.core.lock.require_own()
        read = yield from self._read(calls)
        if self.limiter.period:
            self.require_open()
            patience = min((call.timeout_s for call in calls if call.timeout_s is not None), default=None)
            yield from _results([self.limiter.enter(len(read), patience)])
        return read, self._start(read, scope, began, on_token)

    def _end(
        self, read: Sequence[ReadCall], answers: Sequence[Answer], scope: Scope | None, began: float
    ) -> Generator[Await, None, list[MessageHandle]]:
        """Wait for the answers, and encode those of calls that think; return their handles."""
        handles: list[MessageHandle] = yield from _results(answers)
        thoughts = [
            (n, read_call.call)
            for n, read_call in enumerate(read)
            if isinstance(read_call.call, Decode) and read_call.thinks
        ]
        if not thoughts:
            return handles
        with self._leased_views([handles[place] for place, _ in thoughts]):
            model, find = self.core.model, self.find
            prefills = [answer_of(model, call, find(handles[place])) for place, call in thoughts]
            # The call's timeout covers this, too.
            encoded = self._start(self.builder.read(prefills), scope, began)
            with self.cancel_on_error(encoded, scope):
                answer_handles: list[MessageHandle] = yield from _results(encoded)
        for (place, call), answer in zip(thoughts, answer_handles, strict=True):
            self._join_thought(call, handles[place], answer, scope)
            handles[place] = answer
        return handles

    def _read(self, calls: Calls) -> Generator[Await, None, list[ReadCall]]:
        """Validate and tokenize calls; long texts on another thread."""
        if not any(map(_is_long, calls)):
            return self.builder.read(calls)
        future = Future[list[ReadCall]]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self.builder.read(calls))
                except BaseException as error:
                    future.set_exception(error)

        # One thread for the whole batch: a thousand long texts must not start a thousand threads.
        threading.Thread(target=run, name="choreo-tokenizing", daemon=True).start()
        [read] = yield from _results([future])
        return cast(list[ReadCall], read)

    def submit(self, calls: Calls, scope: Scope | None, on_token: OnToken | None = None) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong.

        Args:
            calls: Calls to run; a decode gets as many answers as its sampling asks for.
            scope: Scope that takes the leases.
            on_token: Called with every sampled token, on the engine's thread; must not raise.
        """
        return self._start(self.builder.read(calls), scope, time.perf_counter(), on_token)

    def _start(
        self, read: Sequence[ReadCall], scope: Scope | None, began: float, on_token: OnToken | None = None
    ) -> list[Answer]:
        """Start calls that were made at a time as one batch: see `submit`."""
        answers, requests = list[Answer](), list[Request]()
        with self.core.lock:
            self.require_open()
            placed_calls = [self.builder.place(read_call) for read_call in read]
            # If the batch cannot be submitted whole, all of it is undone: no call may join a request that never runs.
            with self.cancel_on_error(answers, scope), ExitStack() as undo:
                for placed in placed_calls:
                    call, message = placed.read.call, self._find_answer(placed)
                    if message is not None:
                        if on_token is not None:
                            for chosen in message.chosen or ():
                                on_token(chosen)
                        answers.append(self._answer_with(message, placed, scope))
                        continue
                    request = None if placed.name is None else self.builder.running.get(placed.name)
                    if request is None or request.over:
                        request = self.builder.request(placed)
                        requests.append(request)
                        undo.callback(request.owner.abandon, request)
                    if request in requests:
                        request.priority = max(request.priority, call.priority)
                    else:
                        self.core.loop.raise_priority(request, call.priority)
                    owner, until = request.owner, None if call.timeout_s is None else began + call.timeout_s
                    assert isinstance(owner, PlacedCall)
                    answers.append(owner.join(request, placed, scope, until, on_token))
                self.core.loop.submit(requests)
                undo.pop_all()
            return answers

    def _find_answer(self, placed: PlacedCall) -> Message | None:
        """Return the message that answers a call without a request; None: a request has to make it."""
        core, call, name = self.core, placed.read.call, placed.name
        if isinstance(call, Decode):
            return None if name is None or call.regenerate else core.table.memos.get(name)
        assert name is not None
        known, keeps_kv = core.table.get(name), core.method.keeps_kv
        if known is not None and (call.lazy or known.promise is None):
            self._count_reused(placed, call)
            return known
        waits = not placed.lineage.mapper and name not in self.builder.running
        has_file = waits and known is None and core.cache.files.is_persisted(name, self.name)
        if keeps_kv and not (waits and (call.lazy or has_file)):
            return None
        if placed.lineage.mapper:
            return placed.lineage.parents[0]
        # It stays text, has a file, or is encoded for the first request that reads it.
        message = placed.message(placed.lineage, Usage.of_existing(0))
        message.again = call.recomputed
        if has_file:
            self._count_reused(placed, call)
        elif keeps_kv:
            message.promise = core.next_number()
        return message

    def _count_reused(self, placed: PlacedCall, call: Prefill) -> None:
        """Count the tokens of a prefill that need not be encoded."""
        if self.core.method.keeps_kv and not call.lazy:
            self.core.counters.add(self.name, "tokens_reused", placed.lineage.prompt_tokens())

    def _answer_with(self, message: Message, placed: PlacedCall, scope: Scope | None) -> Answer:
        """Answer a call with a new or known message and a lease of it in a scope, all or nothing."""
        table = self.core.table
        with table.insert_transaction(message) as entered:
            placed.put_on(entered)
            if scope is None or not scope.closed:
                table.lease(entered, scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer

    @contextmanager
    def cancel_on_error(self, answers: Sequence[Answer], scope: Scope | None) -> Iterator[None]:
        """Cancel answers, or return the leases that came with them, if the block raises."""
        try:
            yield
        except BaseException:
            for answer in answers:
                if not answer.cancel():
                    answer.add_done_callback(lambda finished: self._return_lease(finished, scope))
            raise

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        has_lease = not answer.cancelled() and answer.exception() is None
        if has_lease and not self.closed and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, keep_last=False)

    @contextmanager
    def _leased_views(self, thoughts: Sequence[MessageHandle]) -> Iterator[None]:
        """Lease the views of thoughts for a block: their answers will see the same.

        The caller may release them, or the branch of a late parent, while the calls run.
        """
        scope = Scope(None)
        with self.core.lock:
            for message in [parent for thought in thoughts for parent in self.find(thought).parents]:
                self.core.table.lease(message, scope)
        try:
            yield
        finally:
            self.core.close_scope(scope)

    def _join_thought(self, call: Decode, thought: MessageHandle, answer: MessageHandle, scope: Scope | None) -> None:
        """Give an answer the usage and log-probabilities of its decode, and the lease of its thoughts, taken in a
        scope."""
        assert call.thinking is not None
        core = self.core
        with core.lock:
            message, source = self.find(answer), self.find(thought)
            message.finish_reason = source.finish_reason
            if message.chosen is None and source.chosen is not None:
                message.header = len(core.model.encode(call.thinking.answer))
                message.chosen = source.chosen[answer_at(core.model, call.thinking, source) :]
                message.usage = source.usage.with_answer(message.usage)
            core.table.keep(message, Thought(source, call.idempotency_key, scope), scope)
            if source is message:
                # Nothing was thought: thoughts and answer are one message, which is an answer.
                message.is_thought = False
                if call.author is not None:
                    message.authors -= {thinker(call.author)}
                    message.author = call.author

    def _warn_of_cuts(self, read: Sequence[ReadCall], handles: Sequence[MessageHandle]) -> None:
        """Warn about answers cut at the default of `max_tokens`; Python shows each place in a program once."""
        for read_call, handle in zip(read, handles, strict=True):
            call = read_call.call
            usual = isinstance(call, Decode) and not call.sampling.is_bounded and call.played is None
            if usual and self.find(handle).finish_reason == "length":
                warnings.warn(
                    "an answer was truncated at the default limit: set max_tokens (the default is 2,048, or less where "
                    "the context or KV memory ends)",
                    CutAnswerWarning,
                    stacklevel=2,
                )

    def scope(self) -> Scope | None:
        """Return the innermost scope that is open here."""
        return Scope.current(self.scopes)

    @contextmanager
    def scoped(self) -> Iterator[Scope]:
        """Open a scope whose leases end with the block."""
        with Scope(self.scope()).entered(self.scopes) as scope:
            try:
                yield scope
            finally:
                self.core.close_scope(scope)

    def find(self, handle: MessageHandle) -> Message:
        """Return the message of a leased handle; raises a `HandleError` otherwise."""
        with self.core.lock:
            self.require_tenancy()
            return self.builder.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None, *, keep_last: bool) -> None:
        """Drop one lease; with `keep_last`, only if another lease lasts as long as this scope."""
        with self.core.lock:
            message = self.find(handle)
            if not keep_last or message.leases_within(scope) > 1:
                self.core.table.release(message, scope)

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended, or the engine was closed."""
        self.require_tenancy()
        self.core.loop.require_open()

    def require_tenancy(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended."""
        if self.closed:
            raise EngineClosedError("this tenant's engine was closed: open another with tenant()")

    def stop(self) -> None:
        """Let no more calls start, and write KV that is to be kept."""
        self.limiter.close()
        if self.persistent_kv is not None:
            self.persistent_kv.close()

    def close(self) -> None:
        """End the tenancy: write KV that is to be kept, fail unfinished calls, drop leases and all that only it has."""
        core = self.core
        self.stop()
        with core.lock:
            if self.closed:
                return
            self.closed = True
            loop = core.loop
        loop.drop_tenant(self.name)
        with core.lock:
            self.keepers.clear()
            core.kept.pop(self.name, None)
            parts: Any = (core.table, core.thread_leases, core.method, core.adapters, core.counters, core.tier_counters)
            for part in parts:
                part.drop_tenant(self.name)
            core.execution.close_tenant(self.name, self.message_ids.salt)


class _StreamQueue:
    """Queue between the engine's thread and one consumer, which gets a future for each item."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._awaited: Future[Any] | None = None
        self._lock = threading.Lock()

    def put(self, item: Any) -> None:
        """Add an item, on the engine's thread; never raises."""
        with self._lock:
            future, self._awaited = self._awaited, None
            if future is None:
                self._items.append(item)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(item)

    def next(self) -> Future[Any]:
        """Return a future of the next item."""
        future: Future[Any] = Future()
        with self._lock:
            if self._items:
                future.set_result(self._items.popleft())
            else:
                self._awaited = future
        return future


def _drive(steps: Steps[T]) -> Generator[T]:
    """Run steps on this thread, blocking where they wait."""
    with closing(steps):
        for step in steps:
            if isinstance(step, Await):
                step.wait()
            else:
                yield step


async def _adrive(steps: Steps[T]) -> AsyncGenerator[T]:
    """Run steps on an event loop, awaiting where they wait."""
    with closing(steps):
        for step in steps:
            if isinstance(step, Await):
                await step.wait_async()
            else:
                yield step


def plan_call(kind: type, content: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Plan[Any]:
    """Return a plan of the one call that the arguments describe, or of a batch."""
    calls: list[Any] = list(content) if isinstance(content, list | tuple) else []
    is_batch = any(isinstance(call, Prefill | Decode) for call in calls)
    if not is_batch:
        calls = [require_one(kind(content, *args, **options))]
    elif args or options:
        raise InvalidRequestError(f"a batch of {kind.__name__} calls takes no other arguments: set them on each call")
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidRequestError(f"a batch must hold {kind.__name__} calls only, not {call!r}")

    def steps(tenant: Tenant) -> Steps[Any]:
        handles = yield from tenant.run_batch(calls, tenant.scope())
        yield handles if is_batch else handles[0]

    return steps


def require_one(call: Any) -> Any:
    """Return a call that has one answer; raises `InvalidRequestError` if it asks for several."""
    sampling = getattr(call, "sampling", None)
    if isinstance(sampling, Sampling) and sampling.n > 1:
        raise InvalidRequestError(
            f"{sampling.n} answers are returned as a list: pass the call in one, decode([Decode(...)])"
        )
    return call


def _is_long(call: Prefill | Decode) -> bool:
    text = call.content if isinstance(call, Prefill) else call.header
    return isinstance(text, str | PromptText) and len(text) >= LONG
