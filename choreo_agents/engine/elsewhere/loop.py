"""Has requests run by engines elsewhere: the front's bookkeeping, without a step of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing

from choreo_agents.engine.elsewhere.method import ElsewhereEncoding
from choreo_agents.engine.elsewhere.sending import FarEngine, Greeting, SentAnswer, SentCall, sent
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.engine.pending import Pending
from choreo_agents.errors import (
    ChoreoError,
    EngineClosedError,
    RequestTimeoutError,
    UnknownHandleError,
)
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.endings import Endings, failed
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Chosen
from choreo_agents.tracing import EventSink, FirstToken, Ledger, RequestSubmitted, guarded

_LOOK_S = 0.02
"""Seconds between two looks at who waits no longer."""


class ElsewhereLoop:
    """Owns a thread with an event loop, in which every request is a task.

    Args:
        engines: Compute.
        table: Has the messages.
        lock: Guards all bookkeeping.
        counters: Count what is done, here and there.
        sink: Receives events.
        pool: Of the front, with nothing in it.
    """

    def __init__(
        self,
        engines: Sequence[FarEngine],
        table: MessageTable,
        lock: EngineLock,
        counters: Ledger[Counters],
        sink: EventSink,
        pool: KVPool,
    ) -> None:
        self.engines = engines
        self._table, self._lock, self.counters = table, lock, counters
        self._emit = guarded(sink)
        self._ended = lock.condition()
        self._endings = Endings(pool, counters, self._emit, self._ended)
        self._under_way: dict[int, Request] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._held: dict[str, dict[str, str]] = defaultdict(dict)
        """By engine, what it holds for us: the tenant's salt by message."""
        self._closed = False
        self._failure: ChoreoError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
        self._thread.start()

    def greet(self, greeting: Greeting) -> int:
        """Be known to all engines; tokens of KV that each of them has room for at least."""

        async def greeted() -> list[int]:
            return [await engine.greet(greeting) for engine in self.engines]

        return min(asyncio.run_coroutine_threadsafe(greeted(), self._loop).result())

    def submit(self, requests: Sequence[Request]) -> None:
        """Have requests run. Raises what `require_open` does."""
        with self._lock:
            self.require_open()
            for request in requests:
                self._under_way[request.number] = request
                self._emit(
                    RequestSubmitted(request.submitted_s, request.number, request.kind, request.author, request.role)
                )
        if requests:
            self._loop.call_soon_threadsafe(self._begin, list(requests))

    def require_open(self) -> None:
        """See `EngineLoop`."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure.__cause__
        if self._closed:
            raise EngineClosedError("the engine is closed: load a new one")

    def wake(self) -> None: ...

    def hurry(self, request: Request, priority: int) -> None:
        request.priority = max(request.priority, priority)

    def drop_tenant(self, tenant: str) -> None:
        """See `EngineLoop`."""
        error = EngineClosedError("the tenancy was closed before this call was done")
        with self._lock:
            for request in self.requests_of(tenant):
                self._drop(request, error)

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        return len(self._under_way)

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._under_way.values() if request.tenant == tenant]

    def close(self) -> None:
        """Fail what is unfinished with `EngineClosedError`, and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_all(EngineClosedError("the engine was closed before this call was done"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_here:
            self._thread.join()

    def forget(self, message_id: str) -> None:
        """The front has dropped a message: whoever holds it may, too. Under the lock."""
        for engine in self.engines:
            salt = self._held[engine.name].pop(message_id, None)
            if salt is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._release, engine, salt, message_id)

    def _release(self, engine: FarEngine, salt: str, message_id: str) -> None:
        asyncio.ensure_future(engine.release(salt, [message_id]), loop=self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watch = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
        finally:
            watch.cancel()
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _watch(self) -> None:
        """Drop what nobody waits for any more."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with self._lock:
                now = time.perf_counter()
                for request in list(self._under_way.values()):
                    late = request.late(now)
                    for future in late:
                        if future.set_running_or_notify_cancel():
                            future.set_exception(
                                RequestTimeoutError("the call was not done in time: see its timeout_s")
                            )
                    if request.cancelled():
                        self._drop(request, None, "timed out" if late else "cancelled")

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.over:
                self._tasks[request.number] = self._loop.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            with self._lock:
                if request.over:
                    return
                engine = self._choose(request)
                call = self._sent(request, engine)
                self._begun(request)
            try:
                await self._run_there(request, engine, call)
            except UnknownHandleError:
                with self._lock:  # it was released there while we asked for it again: now all of it is sent
                    for parent in call.call.parents:
                        self._held[engine.name].pop(parent.id, None)
                    call = self._sent(request, engine)
                await self._run_there(request, engine, call)
        except asyncio.CancelledError:
            raise
        except Exception as cause:
            with self._lock:
                self._drop(request, cause if isinstance(cause, ChoreoError) else failed(cause))
        finally:
            self._tasks.pop(request.number, None)

    async def _run_there(self, request: Request, engine: FarEngine, call: SentCall) -> None:
        async with aclosing(engine.run(call)) as told:
            async for each in told:
                with self._lock:
                    if request.over:
                        return
                    if isinstance(each, SentAnswer):
                        self._finish(request, each, engine, call)
                    else:
                        self._take(request, each)

    def _choose(self, request: Request) -> FarEngine:
        """Who has most of what a request reads."""
        encoding = request.encoding
        assert isinstance(encoding, ElsewhereEncoding)

        def has(engine: FarEngine) -> int:
            held = self._held[engine.name]
            return sum(len(parent.tokens) for parent in encoding.lineage.parents if parent.handle.id in held)

        return max(self.engines, key=has)

    def _sent(self, request: Request, engine: FarEngine) -> SentCall:
        owner = request.owner
        assert isinstance(owner, Pending) and owner.placed is not None
        seed = None if request.decoding is None else request.decoding.seed
        return sent(request.number, owner.naming.salt, owner.placed, seed, self._held[engine.name])

    def _begun(self, request: Request) -> None:
        encoding = request.encoding
        assert isinstance(encoding, ElsewhereEncoding)
        request.binding = encoding.bind()

    def _take(self, request: Request, chosen: Chosen) -> None:
        if request.first_token_s is None:
            request.first_token_s = now = time.perf_counter()
            self._emit(FirstToken(now, request.number, now - request.submitted_s))
        request.chosen.append(chosen)
        for listener in request.listeners:
            listener(chosen)

    def _finish(self, request: Request, answer: SentAnswer, engine: FarEngine, call: SentCall) -> None:
        held = self._held[engine.name]
        held |= {parent.id: call.salt for parent in call.call.parents}
        held[answer.id] = call.salt
        if request.decoding is not None:
            request.chosen = list(answer.chosen or ())
            request.decoding.cut = answer.finish_reason == "length"
        usage, charges = answer.usage, request.charges
        charges.encoded, charges.recomputed = usage.tokens_encoded, usage.tokens_recomputed
        charges.mapped, charges.foreign = usage.tokens_mapped, usage.tokens_of_other_models
        request.beyond_elsewhere, request.reused_elsewhere = usage.tokens_beyond, usage.tokens_reused
        request.tokens = list(answer.tokens)
        for name, amount in answer.counted.items():
            if name != "tokens_reused":
                self.counters.add(request.tenant, name, amount)
        for message_id in call.promised:
            if (message := self._table.known(message_id)) is not None:
                message.promise = None
        del self._under_way[request.number]
        self._endings.finish(request)
        made = self._table.get(answer.id)
        if made is None:
            self.forget(answer.id)
        else:
            self._table.entry(made)

    def _drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        if request.over:
            return
        self._under_way.pop(request.number, None)
        self._endings.drop(request, error, outcome)
        task = self._tasks.get(request.number)
        if task is not None and not self._closed:
            self._loop.call_soon_threadsafe(task.cancel)

    def _drop_all(self, error: ChoreoError) -> None:
        for request in list(self._under_way.values()):
            self._drop(request, error)
