"""A tenant and its calls, written once: what they wait for is yielded, and a sync and an async driver wait for it.

Each call is answered by what is known or under way, or has a request made.
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
"""What is to be done, for a scope that takes all leases: yields batches of calls, is sent what came of them, and
returns what it is for."""
Item = StreamedToken | MessageHandle
_END = object()
SLICE_S = 0.005
"""Seconds for which one may go on: as long as the interpreter lets a thread, when others want to run."""
LONG = 1 << 14
"""Characters from which on a text is long: about 15 ms."""


_TURNS_S: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
"""Of each event loop: when somebody last waited here."""


async def _give_turn() -> None:
    """Let others have their turn if it is time, and end here if the task was cancelled.

    Who awaits what is there does not wait, and so would keep its event loop from all others, timeouts, and its own
    cancelling.
    """
    loop, task, now = asyncio.get_running_loop(), asyncio.current_task(), time.perf_counter()
    if now - _TURNS_S.get(loop, 0.0) > SLICE_S or (task is not None and task.cancelling()):
        await asyncio.sleep(0)
        _TURNS_S[loop] = time.perf_counter()


@dataclass(frozen=True)
class Await:
    """What has to be waited for."""

    futures: Sequence[Future[Any]]

    def wait(self) -> None:
        """Return when all is there, or the first of it has failed: whoever asked for it learns why."""
        with suppress(Exception):
            for future in self.futures:
                future.result()

    async def awaited(self) -> None:
        """The same. Cancelling the task cancels what it waits for."""
        if all(future.done() for future in self.futures):
            # Not a turn of the event loop for each: an agent whose view is there begins before the next is read.
            await _give_turn()
            return
        with suppress(Exception):
            for future in self.futures:
                await asyncio.wrap_future(future)


Steps = Generator[Await | T]
"""Yields what has to be waited for, and in between what a caller gets."""


def _results(futures: Sequence[Future[Any]]) -> Generator[Await, None, list[Any]]:
    """What futures give, once that was waited for; raises what they do."""
    yield Await(futures)
    return [future.result() for future in futures]


@dataclass(frozen=True)
class CallLimits:
    """What all calls of one plan have in common."""

    priority: int = 0
    timeout_s: float | None = None
    """Of all of them together, from `started` on, as `time.perf_counter` counts."""
    started: float = field(default_factory=time.perf_counter)

    def put_on(self, calls: Calls) -> Any:
        """The same calls under these terms, with the time that is left."""
        left = self.timeout_s
        if isinstance(left, int | float) and left > 0:
            left = max(0.0, left - (time.perf_counter() - self.started))
        return [replace(call, priority=self.priority, timeout_s=left) for call in calls]


class Tenant:
    """The calls of one tenant: no other's message is found here, nor found again as one of its own.

    Every public method may be called from any thread.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self.core = core
        self.message_ids = MessageIds(salt, core.model.adapter.fingerprint, core.secret)
        self.name = self.message_ids.tenant
        """Does not tell the salt."""
        self.builder = RequestBuilder(core, self.message_ids)
        self.scopes = object()
        """Names its scopes in every context, and is nobody else's when it is gone."""
        self.limiter = RateLimiter()
        """Keeps the rate at which its calls start."""
        self.closing = self.closed = False
        """Whether the tenancy is being ended, and whether it has ended."""
        self.persistent_kv = persistent_kv_of(core, self.message_ids, self.builder.find)
        """Has what outlives the engine; None: nothing does."""
        self._keepers: dict[Callable[..., object], Any] = {}
        """What keeps messages for it, by what made it."""

    def run(self, plan: Plan[T], terms: CallLimits | None = None) -> T:
        """Make a plan's calls, and return what it is for."""
        with closing(_waiting(self._planned(plan, terms, self.scope()))) as found:
            return next(found)

    async def arun(self, plan: Plan[T], terms: CallLimits | None = None) -> T:
        """The same. Cancelling the awaiting task stops the requests and frees their memory."""
        async with aclosing(_awaiting(self._planned(plan, terms, self.scope()))) as found:
            return await anext(found)

    def stream(self, call: Decode) -> Generator[Item]:
        """Each token of a decode as it comes, and the handle last. Leaving early cancels it."""
        return _waiting(self._streamed(call, self.scope()))

    def astream(self, call: Decode) -> AsyncGenerator[Item]:
        """The same."""
        return _awaiting(self._streamed(call, self.scope()))

    def _planned(self, plan: Plan[T], terms: CallLimits | None, scope: Scope | None) -> Steps[T]:
        with closing(plan(scope)) as batches:
            try:
                calls = next(batches)
                while True:
                    calls = calls if terms is None else terms.put_on(calls)
                    calls = batches.send((yield from self._made(calls, scope)))
            except StopIteration as done:
                found: T = done.value
        yield found

    def _made(self, calls: Calls, scope: Scope | None) -> Generator[Await, None, list[MessageHandle]]:
        """What comes of a batch."""
        started = yield from self._let_in(calls)
        calls = yield from self._tokenized(calls)
        asked: Any = [with_thinking(call) if thinks(call) else call for call in calls]
        answers = self.submit(asked, scope, started)
        with self.given_up_if_left(answers, scope):
            handles: list[MessageHandle] = yield from _results(answers)
            if any(map(thinks, calls)):
                handles = yield from self._answered(calls, handles, scope, started)
        self._warn_of_cuts(calls, handles)
        return handles

    def _streamed(self, call: Decode, scope: Scope | None) -> Steps[Item]:
        started = yield from self._let_in([call])
        [call] = yield from self._tokenized([call])
        arrived, model = _Arrived(), self.core.model
        asked = with_thinking(call) if thinks(call) else call
        [answer] = self.submit([asked], scope, started, arrived.put)
        answer.add_done_callback(lambda _: arrived.put(_END))
        texts = PhaseTexts(model, call.thinking)
        with self.given_up_if_left([answer], scope):
            while (chosen := (yield from _results([arrived.next()]))[0]) is not _END:
                phase, text = texts.add(chosen.token)
                yield StreamedToken(chosen.token, text, chosen, phase)
            handles = [answer.result()]
            if thinks(call):
                handles = yield from self._answered([call], handles, scope, started)
        self._warn_of_cuts([call], handles)
        yield handles[0]

    def _let_in(self, calls: Sequence[Prefill | Decode]) -> Generator[Await, None, float]:
        """Wait until calls may start; when they were made, as `time.perf_counter` counts."""
        made = time.perf_counter()
        self.core.lock.require_own()
        if self.limiter.period:
            self.require_open()
            for call in calls:
                require_urgency(call)
            patience = min((call.timeout_s for call in calls if call.timeout_s is not None), default=None)
            yield from _results([self.limiter.enter(sum(map(_answers, calls)), patience)])
        return made

    def _tokenized(self, calls: Calls) -> Generator[Await, None, Any]:
        """The same calls, with tokens in the place of long texts.

        What cannot be tokenized stays as it is: whoever makes the request of it says what is wrong.
        """
        if not any(map(_is_long, calls)):
            return calls
        model, made = self.core.model, Future[list[Any]]()

        def run() -> None:
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result([_tokenized(model, call) if _is_long(call) else call for call in calls])
                except BaseException as error:
                    made.set_exception(error)

        # One for all of a batch: a thousand long texts are no reason for a thousand threads.
        threading.Thread(target=run, name="choreo-tokenizing", daemon=True).start()
        return (yield from _results([made]))[0]

    def submit(
        self,
        calls: Calls,
        scope: Scope | None,
        started: float | None = None,
        on_token: OnToken | None = None,
    ) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong.

        Args:
            calls: What to encode, or to decode: with as many answers to each as its sampling asks for.
            scope: Which takes the leases.
            started: When the calls were made, as `time.perf_counter` counts; None: now.
            on_token: Called with every sampled token, on the engine's thread; must not raise.
        """
        answers, requests = list[Answer](), list[Request]()

        def answer(placed: PlacedCall) -> Answer:
            """To a call that is known already or under way, or that has a new request in this batch."""
            call = placed.read.call
            if isinstance(call, Prefill):
                known = _prefilled(self, placed, call)
            else:  # the answer that the same decode was given before
                known = None if placed.name is None or call.regenerate else self.core.table.memos.get(placed.name)
                if known is not None and on_token is not None:
                    for chosen in known.chosen or ():
                        on_token(chosen)
            if known is not None:
                return self.answered(known, placed, scope)
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

        read = [each for call in calls for each in self.builder.read(call)]
        with self.core.lock:
            self.require_open()
            placed = [self.builder.place(each) for each in read]
            began = time.perf_counter() if started is None else started
            # If it cannot be submitted whole, all of it is given back: nobody may join what will never run.
            with self.given_up_if_left(answers, scope), ExitStack() as undo:
                for each in placed:
                    answers.append(answer(each))
                self.core.loop.submit(requests)
                undo.pop_all()
            return answers

    def answered(
        self, message: Message, placed: PlacedCall, scope: Scope | None, segment: Segment | None = None
    ) -> Answer:
        """A call's answer that is there, with a lease; all or nothing.

        Args:
            message: New or known.
            placed: The call.
            scope: Which takes the lease.
            segment: The message's KV, if it was encoded elsewhere; its pin is taken over in any case.
        """
        table = self.core.table
        with table.entering(message, segment) as entered:
            placed.said.put_on(entered)
            if scope is None or not scope.closed:
                table.lease(entered, scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer

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
        given = not answer.cancelled() and answer.exception() is None
        if given and not self.closed and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, keep_last=False)

    def _answered(
        self, calls: Calls, handles: list[MessageHandle], scope: Scope | None, started: float
    ) -> Generator[Await, None, list[MessageHandle]]:
        """What was said, in the place of what was thought and said; all others as they are.

        The calls go on: their time has run since they were started.
        """
        each = [call for call in calls for _ in range(_answers(call))]
        thought = [(place, call) for place, call in enumerate(each) if thinks(call)]
        with leased_views(self, [handles[place] for place, _ in thought]):
            model, find = self.core.model, self.find
            asked: Any = [answer_of(model, call, find(handles[place])) for place, call in thought]
            answers = self.submit(asked, scope, started)
            with self.given_up_if_left(answers, scope):
                said: list[MessageHandle] = yield from _results(answers)
        for (place, call), answer in zip(thought, said, strict=True):
            handles[place] = join(self, call, handles[place], answer, scope)
        return handles

    def _warn_of_cuts(self, calls: Calls, handles: Sequence[MessageHandle]) -> None:
        """Say where answers were cut at a length that nobody has said: each place in a program is told once."""
        each = [call for call in calls for _ in range(_answers(call))]
        for call, handle in zip(each, handles, strict=True):
            usual = isinstance(call, Decode) and not call.sampling.is_bounded and call.played is None
            if usual and self.find(handle).finish_reason == "length":
                warnings.warn(
                    "an answer was cut, since nobody has said how long it may be: set max_tokens, where 2,048 are the "
                    "default, or less where the context or KV memory ends",
                    CutAnswerWarning,
                    stacklevel=2,
                )

    def scope(self) -> Scope | None:
        """The innermost one that is open here."""
        return Scope.current(self.scopes)

    @contextmanager
    def scoped(self) -> Iterator[Scope]:
        """A block whose leases end with it."""
        with Scope(self.scope()).entered(self.scopes) as scope:
            try:
                yield scope
            finally:
                self.core.close_scope(scope)

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        with self.core.lock:
            self.require_tenancy()
            return self.builder.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None, *, keep_last: bool) -> None:
        """Drop one lease; with `keep_last`, unless it is the last that does not end with another's scope."""
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
            self.require_tenancy()  # the file took its time
            name = core.adapters.require_free(loaded, name, self.name)
        core.execution.load_adapter(core, loaded.folder, name, self.message_ids)
        with core.lock:
            return core.adapters.add(loaded, name, self.name)

    def keeper(self, make: Callable[..., T], *args: Any) -> T:
        """What `make` makes, once: see `KVTransfer.get_or_create`."""
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
        """Let none of its calls start, and write what is to be kept."""
        self.limiter.close()
        if self.persistent_kv is not None:
            self.persistent_kv.close()

    def close(self) -> None:
        """End the tenancy: write what is to be kept, fail unfinished calls, drop leases and all that only it holds."""
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


def _prefilled(tenant: Tenant, placed: PlacedCall, call: Prefill) -> Message | None:
    """The message that a prefill finds, or that need not be encoded now; None: a request has to make it."""
    core, lineage = tenant.core, placed.lineage
    assert placed.name is not None
    known = core.table.get(placed.name)
    if known is not None and (call.lazy or known.promise is None):
        if core.method.keeps_kv and not call.lazy:
            core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
        return known
    waits = not lineage.mapper and placed.name not in tenant.builder.running
    has_file = waits and known is None and tenant.persistent_kv is not None and tenant.persistent_kv.knows(placed.name)
    if core.method.keeps_kv and not (waits and (call.lazy or has_file)):
        return None
    if has_file and not call.lazy:
        core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
    if lineage.mapper:
        return lineage.parents[0]
    # It stays text, has a file, or whoever reads it first has it encoded.
    keeps = core.method.keeps_kv
    label = lineage.label(call.author, call.role, placed.said.source) if keeps else ""
    return Message(
        tenant.message_ids.handle(lineage),
        lineage,
        call.author,
        call.role,
        Usage.of_existing(0),
        label,
        placed.said.origin(label),
        header=len(lineage.tokens) if keeps else 0,
        promise=core.next_number() if keeps and not has_file else None,
        again=call.recomputed,
    )


class _Arrived:
    """What has arrived and was not yet asked for, or a future for what is asked for and has not arrived."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._asked: Future[Any] | None = None
        self._lock = threading.Lock()

    def put(self, item: Any) -> None:
        """On the engine's thread; never raises."""
        with self._lock:
            asked, self._asked = self._asked, None
            if asked is None:
                self._items.append(item)
        if asked is not None and asked.set_running_or_notify_cancel():
            asked.set_result(item)

    def next(self) -> Future[Any]:
        """The next item."""
        asked: Future[Any] = Future()
        with self._lock:
            if self._items:
                asked.set_result(self._items.popleft())
            else:
                self._asked = asked
        return asked


def _waiting(steps: Steps[T]) -> Generator[T]:
    """What steps give, on a thread that waits for what they wait for."""
    with closing(steps):
        for step in steps:
            if isinstance(step, Await):
                step.wait()
            else:
                yield step


async def _awaiting(steps: Steps[T]) -> AsyncGenerator[T]:
    """The same on an event loop."""
    with closing(steps):
        for step in steps:
            if isinstance(step, Await):
                await step.awaited()
            else:
                yield step


def called(kind: type, content: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Plan[Any]:
    """Of the one call that the arguments spell out, or of a batch."""
    calls = content if isinstance(content, list | tuple) else []
    if not any(isinstance(call, Prefill | Decode) for call in calls):
        return _batch([require_one(kind(content, *args, **options))], one=True)
    if args or options:
        raise InvalidRequestError(f"a batch of {kind.__name__} calls takes no other arguments: give them to each call")
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidRequestError(f"a batch holds {kind.__name__} calls only, not {call!r}")
    return _batch(list(calls), one=False)


def require_one(call: Any) -> Any:
    """A call whose answer is one message; raises `InvalidRequestError` if it asks for several."""
    if (answers := _answers(call)) > 1:
        raise InvalidRequestError(f"{answers} answers come as a list: pass the call in one, decode([Decode(...)])")
    return call


def _answers(call: Any) -> int:
    """Count the messages that come of a call, or that would if it were right."""
    return call.sampling.n if isinstance(call, Decode) and isinstance(call.sampling, Sampling) else 1


def _batch(calls: list[Any], *, one: bool) -> Plan[Any]:
    def plan(_: Scope | None) -> Generator[Calls, list[MessageHandle], Any]:
        handles = yield calls
        return handles[0] if one else handles

    return plan


def _name(call: Prefill | Decode) -> str:
    return "content" if isinstance(call, Prefill) else "header"


def _is_long(call: Prefill | Decode) -> bool:
    text = getattr(call, _name(call))
    return isinstance(text, str | PromptText) and len(text) >= LONG


def _tokenized(model: LoadedModel, call: Prefill | Decode) -> Prefill | Decode:
    text = getattr(call, _name(call))
    framed = PromptText.plain(text) if call.escape_special_tokens and isinstance(text, str) else text
    try:
        tokens: dict[str, Any] = {_name(call): tuple(model.encode(framed))}
    except (InvalidRequestError, TypeError, UnicodeError):
        return call
    return replace(call, **tokens)


@contextmanager
def leased_views(tenant: Tenant, thoughts: Sequence[MessageHandle]) -> Iterator[None]:
    """Lease what messages have seen while the block lasts: answers are to see it as well.

    Whoever made the calls may have released it, or a late parent's branch, while they were under way.
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
            # Who closes a tenancy, or releases what is not its own to release, has dropped them.
            for message in views:
                if message.leases:
                    core.table.release(message, None)


def join(
    tenant: Tenant, call: Decode, thought: MessageHandle, answer: MessageHandle, scope: Scope | None
) -> MessageHandle:
    """Say of an answer what it was decoded with, and give it the lease of its thoughts, which was taken in a scope."""
    assert call.thinking is not None
    core = tenant.core
    with core.lock:
        message, source = tenant.find(answer), tenant.find(thought)
        message.finish_reason = source.finish_reason
        if message.chosen is None and source.chosen is not None:
            message.header = len(core.model.encode(call.thinking.answer))
            message.chosen = source.chosen[answer_at(core.model, call.thinking, source) :]
            message.usage = _both(source.usage, message.usage)
        core.table.keep(message, Thought(source, call.idempotency_key, scope), scope)
        if source is message:
            # Nothing was thought: it is one message, which is nobody's thoughts.
            message.is_thought = False
            if call.author is not None:
                message.authors -= {thinker(call.author)}
                message.author = call.author
    return answer


def _both(thought: Usage, encoded: Usage) -> Usage:
    """What thinking and answering have cost, and encoding the answer for its readers."""
    both = ("tokens_encoded", "duration_s", "tokens_recomputed", "tokens_outside_view", "tokens_of_other_models")
    return replace(thought, **{name: getattr(thought, name) + getattr(encoded, name) for name in both})
