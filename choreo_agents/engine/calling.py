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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.calls import Calls, Decode, Prefill, StreamedToken
from choreo_agents.engine.constraints import PhaseTexts, answer_at, answer_of, thinks, with_thinking
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message, MessageIds, Scope, Thought, Usage, thinker
from choreo_agents.engine.persistent_kv import persistent_kv_of
from choreo_agents.engine.rate_limit import RateLimiter
from choreo_agents.engine.request_builder import Answer, OnToken, Pending, PlacedCall, RequestBuilder, require_urgency
from choreo_agents.errors import CutAnswerWarning, EngineClosedError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Segment
from choreo_agents.models import LoadedModel, PromptText
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Sampling

T = TypeVar("T")
Plan = Callable[[Scope | None], Generator[Calls, list[MessageHandle], T]]
"""Plan of calls for a scope that takes all leases: yields batches, is sent their handles, and returns a result."""
Item = StreamedToken | MessageHandle
_END = object()
SLICE_S = 0.005
"""Longest seconds without a yield to the event loop: CPython's thread switch interval."""
LONG = 1 << 14
"""Characters from which a text is tokenized on another thread: about 15 ms."""


_LAST_YIELD_S: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
"""Time of the last yield, by event loop."""


async def _yield_turn() -> None:
    """Yield to the event loop if it is due, or if the task was cancelled, which is raised here.

    Awaiting finished futures never yields, and would starve other tasks, timeouts and cancellation.
    """
    loop, task, now = asyncio.get_running_loop(), asyncio.current_task(), time.perf_counter()
    if now - _LAST_YIELD_S.get(loop, 0.0) > SLICE_S or (task is not None and task.cancelling()):
        await asyncio.sleep(0)
        _LAST_YIELD_S[loop] = time.perf_counter()


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
            # No loop turn per call: an agent whose view is ready starts before the next one is read.
            await _yield_turn()
            return
        with suppress(Exception):
            for future in self.futures:
                await asyncio.wrap_future(future)


Steps = Generator[Await | T]
"""Generator that yields what to wait for and, in between, items for the caller."""


def _results(futures: Sequence[Future[Any]]) -> Generator[Await, None, list[Any]]:
    """Wait for futures and return their results; raises their first error."""
    yield Await(futures)
    return [future.result() for future in futures]


@dataclass(frozen=True)
class CallLimits:
    """Limits that all calls of a plan share."""

    priority: int = 0
    timeout_s: float | None = None
    """Seconds for all of them together, from `started` on, a time of `time.perf_counter`."""
    started: float = field(default_factory=time.perf_counter)

    def put_on(self, calls: Calls) -> Any:
        """Return the calls with these limits, and the time that remains."""
        remaining_s = self.timeout_s
        if isinstance(remaining_s, int | float) and remaining_s > 0:
            remaining_s = max(0.0, remaining_s - (time.perf_counter() - self.started))
        return [replace(call, priority=self.priority, timeout_s=remaining_s) for call in calls]


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
        self._keepers: dict[Callable[..., object], Any] = {}
        """Objects that keep messages for it, by the function that made them."""

    def run(self, plan: Plan[T], terms: CallLimits | None = None) -> T:
        """Run a plan's calls, and return its result."""
        with closing(_drive(self._run_plan(plan, terms, self.scope()))) as results:
            return next(results)

    async def arun(self, plan: Plan[T], terms: CallLimits | None = None) -> T:
        """Run a plan like `run`. Cancelling the awaiting task stops the requests and frees their memory."""
        async with aclosing(_adrive(self._run_plan(plan, terms, self.scope()))) as results:
            return await anext(results)

    def stream(self, call: Decode) -> Generator[Item]:
        """Yield each token of a decode as it is sampled, and the handle last. Closing it early cancels the decode."""
        return _drive(self._stream_tokens(call, self.scope()))

    def astream(self, call: Decode) -> AsyncGenerator[Item]:
        """Stream like `stream`, on an event loop."""
        return _adrive(self._stream_tokens(call, self.scope()))

    def _run_plan(self, plan: Plan[T], terms: CallLimits | None, scope: Scope | None) -> Steps[T]:
        with closing(plan(scope)) as batches:
            try:
                calls = next(batches)
                while True:
                    calls = calls if terms is None else terms.put_on(calls)
                    calls = batches.send((yield from self._run_batch(calls, scope)))
            except StopIteration as done:
                result: T = done.value
        yield result

    def _run_batch(self, calls: Calls, scope: Scope | None) -> Generator[Await, None, list[MessageHandle]]:
        """Run a batch and return its handles."""
        started = yield from self._wait_for_start(calls)
        calls = yield from self._tokenize_long(calls)
        submitted: Any = [with_thinking(call) if thinks(call) else call for call in calls]
        answers = self.submit(submitted, scope, started)
        with self.cancel_on_error(answers, scope):
            handles: list[MessageHandle] = yield from _results(answers)
            if any(map(thinks, calls)):
                handles = yield from self._encode_answers(calls, handles, scope, started)
        self._warn_of_cuts(calls, handles)
        return handles

    def _stream_tokens(self, call: Decode, scope: Scope | None) -> Steps[Item]:
        started = yield from self._wait_for_start([call])
        [call] = yield from self._tokenize_long([call])
        arrived, model = _StreamQueue(), self.core.model
        submitted = with_thinking(call) if thinks(call) else call
        [answer] = self.submit([submitted], scope, started, arrived.put)
        answer.add_done_callback(lambda _: arrived.put(_END))
        texts = PhaseTexts(model, call.thinking)
        with self.cancel_on_error([answer], scope):
            while (chosen := (yield from _results([arrived.next()]))[0]) is not _END:
                phase, text = texts.add(chosen.token)
                yield StreamedToken(chosen.token, text, chosen, phase)
            handles = [answer.result()]
            if thinks(call):
                handles = yield from self._encode_answers([call], handles, scope, started)
        self._warn_of_cuts([call], handles)
        yield handles[0]

    def _wait_for_start(self, calls: Sequence[Prefill | Decode]) -> Generator[Await, None, float]:
        """Wait until calls may start, and return when they were made, in seconds of `time.perf_counter`."""
        now = time.perf_counter()
        self.core.lock.require_own()
        if self.limiter.period:
            self.require_open()
            for call in calls:
                require_urgency(call)
            patience = min((call.timeout_s for call in calls if call.timeout_s is not None), default=None)
            yield from _results([self.limiter.enter(sum(map(_count_answers, calls)), patience)])
        return now

    def _tokenize_long(self, calls: Calls) -> Generator[Await, None, Any]:
        """Replace long texts by their tokens.

        What cannot be tokenized is left as it is: building the request raises the error.
        """
        if not any(map(_is_long, calls)):
            return calls
        model, future = self.core.model, Future[list[Any]]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result([_tokenize(model, call) if _is_long(call) else call for call in calls])
                except BaseException as error:
                    future.set_exception(error)

        # One thread for the whole batch: a thousand long texts must not start a thousand threads.
        threading.Thread(target=run, name="choreo-tokenizing", daemon=True).start()
        return (yield from _results([future]))[0]

    def submit(
        self,
        calls: Calls,
        scope: Scope | None,
        started: float | None = None,
        on_token: OnToken | None = None,
    ) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong.

        Args:
            calls: Calls to run; a decode gets as many answers as its sampling asks for.
            scope: Scope that takes the leases.
            started: When the calls were made, in seconds of `time.perf_counter`; None: now.
            on_token: Called with every sampled token, on the engine's thread; must not raise.
        """
        answers, requests = list[Answer](), list[Request]()

        def answer(placed: PlacedCall) -> Answer:
            """Answer a call from a known message or a running request, or by a new request in this batch."""
            call = placed.read.call
            if isinstance(call, Prefill):
                message = _find_prefill(self, placed, call)
            else:  # the remembered answer of an equal decode
                message = None if placed.name is None or call.regenerate else self.core.table.memos.get(placed.name)
                if message is not None and on_token is not None:
                    for chosen in message.chosen or ():
                        on_token(chosen)
            if message is not None:
                return self.answer_with(message, placed, scope)
            request = None if placed.name is None else self.builder.running.get(placed.name)
            if request is None or request.over:
                request = self.builder.request(placed)
                requests.append(request)
                undo.callback(request.owner.abandon, request)
            pending = request.owner
            assert isinstance(pending, Pending)
            if request in requests:
                request.priority = max(request.priority, call.priority)
            else:
                self.core.loop.raise_priority(request, call.priority)
            deadline = None if call.timeout_s is None else began + call.timeout_s
            return pending.awaited(request, placed, scope, deadline, on_token)

        read = [read_call for call in calls for read_call in self.builder.read(call)]
        with self.core.lock:
            self.require_open()
            placed = [self.builder.place(read_call) for read_call in read]
            began = time.perf_counter() if started is None else started
            # If the batch cannot be submitted whole, all of it is undone: no call may join a request that never runs.
            with self.cancel_on_error(answers, scope), ExitStack() as undo:
                for placed_call in placed:
                    answers.append(answer(placed_call))
                self.core.loop.submit(requests)
                undo.pop_all()
            return answers

    def answer_with(
        self, message: Message, placed: PlacedCall, scope: Scope | None, segment: Segment | None = None
    ) -> Answer:
        """Answer a call with a message and a lease of it, all or nothing.

        Args:
            message: New or known message.
            placed: The call.
            scope: Scope that takes the lease.
            segment: The message's KV, if it was encoded elsewhere; its pin is taken over in any case.
        """
        table = self.core.table
        with table.insert_transaction(message, segment) as entered:
            placed.label.put_on(entered)
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

    def _encode_answers(
        self, calls: Calls, handles: list[MessageHandle], scope: Scope | None, started: float
    ) -> Generator[Await, None, list[MessageHandle]]:
        """Encode the answers of calls that think, and return their handles in place of those of thoughts.

        A call's timeout covers this, too: it runs since `started`.
        """
        expanded = [call for call in calls for _ in range(_count_answers(call))]
        thought = [(place, call) for place, call in enumerate(expanded) if thinks(call)]
        with leased_views(self, [handles[place] for place, _ in thought]):
            model, find = self.core.model, self.find
            prefills: Any = [answer_of(model, call, find(handles[place])) for place, call in thought]
            answers = self.submit(prefills, scope, started)
            with self.cancel_on_error(answers, scope):
                answer_handles: list[MessageHandle] = yield from _results(answers)
        for (place, call), answer in zip(thought, answer_handles, strict=True):
            handles[place] = join(self, call, handles[place], answer, scope)
        return handles

    def _warn_of_cuts(self, calls: Calls, handles: Sequence[MessageHandle]) -> None:
        """Warn about answers cut at the default of `max_tokens`; Python shows each place in a program once."""
        expanded = [call for call in calls for _ in range(_count_answers(call))]
        for call, handle in zip(expanded, handles, strict=True):
            usual = isinstance(call, Decode) and not call.sampling.is_bounded and call.played is None
            if usual and self.find(handle).finish_reason == "length":
                warnings.warn(
                    "an answer was cut, since nobody has said how long it may be: set max_tokens, where 2,048 are the "
                    "default, or less where the context or KV memory ends",
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

    def load_adapter(self, folder: str | Path, name: str | None) -> str:
        """See `Engine.load_adapter`."""
        core = self.core
        self.require_tenancy()
        loaded = read_loaded(core.model.adapter, folder)
        with core.lock:
            self.require_tenancy()  # reading takes a while: the tenancy may have ended
            name = core.adapters.require_free(loaded, name, self.name)
        core.execution.load_adapter(core, loaded.folder, name, self.message_ids)
        with core.lock:
            return core.adapters.add(loaded, name, self.name)

    def keeper(self, make: Callable[..., T], *args: Any) -> T:
        """Return what `make` returned the first time: see `KVTransfer.get_or_create`."""
        with self.core.lock:
            self.require_tenancy()
            if make not in self._keepers:
                self._keepers[make] = make(*args)
            return cast(T, self._keepers[make])

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended, or the engine was closed."""
        self.require_tenancy()
        self.core.loop.require_open()

    def require_tenancy(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended."""
        if self.closed:
            raise EngineClosedError("this tenancy was closed: begin another with tenant()")

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
            self._keepers.clear()
            core.kept.pop(self.name, None)
            parts: Any = (core.table, core.thread_leases, core.method, core.adapters, core.counters, core.tier_counters)
            for part in parts:
                part.drop_tenant(self.name)


def _find_prefill(tenant: Tenant, placed: PlacedCall, call: Prefill) -> Message | None:
    """Return the message that answers a prefill without a request; None: a request has to encode it."""
    core, lineage = tenant.core, placed.lineage
    assert placed.name is not None
    cached = core.table.get(placed.name)
    if cached is not None and (call.lazy or cached.promise is None):
        if core.method.keeps_kv and not call.lazy:
            core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
        return cached
    waits = not lineage.mapper and placed.name not in tenant.builder.running
    has_file = waits and cached is None and tenant.persistent_kv is not None and tenant.persistent_kv.knows(placed.name)
    if core.method.keeps_kv and not (waits and (call.lazy or has_file)):
        return None
    if has_file and not call.lazy:
        core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
    if lineage.mapper:
        return lineage.parents[0]
    # It stays text, has a file, or is encoded for the first request that reads it.
    keeps = core.method.keeps_kv
    label = lineage.label(call.author, call.role, placed.label.source) if keeps else ""
    return Message(
        tenant.message_ids.handle(lineage),
        lineage,
        call.author,
        call.role,
        Usage.of_existing(0),
        label,
        placed.label.origin(label),
        header=len(lineage.tokens) if keeps else 0,
        promise=core.next_number() if keeps and not has_file else None,
        again=call.recomputed,
    )


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
    calls = content if isinstance(content, list | tuple) else []
    if not any(isinstance(call, Prefill | Decode) for call in calls):
        return _batch([require_one(kind(content, *args, **options))], single=True)
    if args or options:
        raise InvalidRequestError(f"a batch of {kind.__name__} calls takes no other arguments: give them to each call")
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidRequestError(f"a batch holds {kind.__name__} calls only, not {call!r}")
    return _batch(list(calls), single=False)


def require_one(call: Any) -> Any:
    """Return a call that has one answer; raises `InvalidRequestError` if it asks for several."""
    if (answers := _count_answers(call)) > 1:
        raise InvalidRequestError(f"{answers} answers come as a list: pass the call in one, decode([Decode(...)])")
    return call


def _count_answers(call: Any) -> int:
    """Return the number of answers of a call, or that it would have if it were valid."""
    return call.sampling.n if isinstance(call, Decode) and isinstance(call.sampling, Sampling) else 1


def _batch(calls: list[Any], *, single: bool) -> Plan[Any]:
    def plan(_: Scope | None) -> Generator[Calls, list[MessageHandle], Any]:
        handles = yield calls
        return handles[0] if single else handles

    return plan


def _text_field(call: Prefill | Decode) -> str:
    return "content" if isinstance(call, Prefill) else "header"


def _is_long(call: Prefill | Decode) -> bool:
    text = getattr(call, _text_field(call))
    return isinstance(text, str | PromptText) and len(text) >= LONG


def _tokenize(model: LoadedModel, call: Prefill | Decode) -> Prefill | Decode:
    text = getattr(call, _text_field(call))
    framed = PromptText.plain(text) if call.escape_special_tokens and isinstance(text, str) else text
    try:
        tokens: dict[str, Any] = {_text_field(call): tuple(model.encode(framed))}
    except (InvalidRequestError, TypeError, UnicodeError):
        return call
    return replace(call, **tokens)


@contextmanager
def leased_views(tenant: Tenant, thoughts: Sequence[MessageHandle]) -> Iterator[None]:
    """Lease the views of thoughts for a block: their answers will see the same.

    The caller may release them, or the branch of a late parent, while the calls run.
    """
    core = tenant.core
    with core.lock:
        views = [parent for thought in thoughts for parent in tenant.find(thought).parents]
        for message in views:
            core.table.lease(message, None)
    try:
        yield
    finally:
        with core.lock:
            # Closing the tenancy, or releasing more leases than one's own, may have dropped them.
            for message in views:
                if message.leases:
                    core.table.release(message, None)


def join(
    tenant: Tenant, call: Decode, thought: MessageHandle, answer: MessageHandle, scope: Scope | None
) -> MessageHandle:
    """Give an answer the usage and log-probabilities of its decode, and the lease of its thoughts, taken in a scope."""
    assert call.thinking is not None
    core = tenant.core
    with core.lock:
        message, source = tenant.find(answer), tenant.find(thought)
        message.finish_reason = source.finish_reason
        if message.chosen is None and source.chosen is not None:
            message.header = len(core.model.encode(call.thinking.answer))
            message.chosen = source.chosen[answer_at(core.model, call.thinking, source) :]
            message.usage = _add_usage(source.usage, message.usage)
        core.table.keep(message, Thought(source, call.idempotency_key, scope), scope)
        if source is message:
            # Nothing was thought: thoughts and answer are one message, which is an answer.
            message.is_thought = False
            if call.author is not None:
                message.authors -= {thinker(call.author)}
                message.author = call.author
    return answer


def _add_usage(thought: Usage, encoded: Usage) -> Usage:
    """Return the usage of thinking and answering together with that of encoding the answer."""
    both = ("tokens_encoded", "duration_s", "tokens_recomputed", "tokens_outside_view", "tokens_of_other_models")
    return replace(thought, **{name: getattr(thought, name) + getattr(encoded, name) for name in both})
