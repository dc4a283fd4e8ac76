"""Has requests run by engines elsewhere: the router's bookkeeping, without a step of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from choreo_agents import Decode
from choreo_agents.engine.delegation import Completion, Pending, Request, failed
from choreo_agents.errors import ChoreoError, EngineClosedError, InvalidRequestError, RequestTimeoutError
from choreo_agents.tracing import EventSink, RequestSubmitted, guarded
from choreo_ray.remote.dispatcher import RequestDispatcher
from choreo_ray.remote.routing import Route

LOOK_S = 0.02
"""Seconds between two looks at who waits no longer."""


class RemoteLoop:
    """Owns a thread with an event loop, in which every request is a task (see `RequestLoop`).

    Args:
        errands: What a request's task does.
        endings: End requests.
        lock: Guards all bookkeeping.
        sink: Receives events.
    """

    def __init__(
        self, errands: RequestDispatcher, endings: Completion, lock: AbstractContextManager[None], sink: EventSink
    ) -> None:
        self._errands, self._endings, self._lock = errands, endings, lock
        self._emit = guarded(sink)
        self._under_way: dict[int, Request] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        errands.attach(self)
        self._thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have something done on its thread, and wait for it; on another one only. Raises what `require_open` does."""
        if self._closed:
            work.close()
            self.require_open()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError:
            self.require_open()  # it was closed meanwhile
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Have requests run, which are placed together. Raises what `require_open` does."""
        with self._lock:
            self.require_open()
            for request in requests:
                _require_sendable(request)
            for request in requests:
                self._under_way[request.number] = request
                self._emit(
                    RequestSubmitted(request.submitted_s, request.number, request.kind, request.author, request.role)
                )
        if requests:
            self.soon(lambda: self._begin(requests))

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the engine was closed."""
        if self._closed:
            raise EngineClosedError("the engine is closed: load a new one")

    @property
    def watches(self) -> list[Any]:
        """Nobody is told of steps: they are made where calls are run."""
        return []

    def answers(self) -> bool:
        """Whether what it has others compute with does so still: it may come back."""
        return True

    def wake(self) -> None:
        """Nothing here waits for files."""

    def raise_priority(self, request: Request, priority: int) -> None:
        """Give a request a higher priority, wherever it is."""
        if priority > request.priority:
            request.priority = priority
            self.soon(lambda: self.spawn(self._errands.raise_priority(request)))

    def soon(self, work: Callable[[], object]) -> None:
        """Have something done on its thread; nothing once it is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(work)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin something that nobody waits for. On its thread."""
        task = self._loop.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`."""
        error = EngineClosedError("the tenancy was closed before this call was done")
        with self._lock:
            for request in self.requests_of(tenant):
                self.drop(request, error)

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._under_way)

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._under_way.values() if request.tenant == tenant]

    def close(self) -> None:
        """Fail what is unfinished with `EngineClosedError`, give back what engines hold for it, and end the thread."""
        with self._lock:
            if self._closed:
                return
            for request in list(self._under_way.values()):
                self.drop(request, EngineClosedError("the engine was closed before this call was done"))
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_here:
            self._thread.join()

    def finish(self, request: Request) -> None:
        """A request is done. Under the lock."""
        del self._under_way[request.number]
        self._endings.finish(request)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """A request ends without a result. Under the lock."""
        if request.over:
            return
        self._under_way.pop(request.number, None)
        self._endings.drop(request, error, outcome)
        if (task := self._tasks.get(request.number)) is not None:
            self.soon(task.cancel)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watch = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._errands.leave())
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
            await asyncio.sleep(LOOK_S)
            with self._lock:
                self._drop_left()

    def _drop_left(self) -> None:
        now = time.perf_counter()
        for request in list(self._under_way.values()):
            late = request.late(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call was not done in time: see its timeout_s"))
            if request.cancelled():
                self.drop(request, None, "timed out" if late else "cancelled")

    def _begin(self, requests: Sequence[Request]) -> None:
        with self._lock:  # one after the other, before any runs: each is placed where the others leave room
            self._drop_left()
            for request in requests:
                if request.over:
                    continue
                try:
                    placed = self._errands.place(request)
                except Exception as cause:
                    self.drop(request, cause if isinstance(cause, ChoreoError) else failed(cause))
                    continue
                task = self._tasks[request.number] = self._loop.create_task(self._serve(request, placed))
                task.add_done_callback(partial(self._done, request.number))

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        with self._lock:  # one that was dropped before its first step has given nothing back
            self._errands.over(number)

    async def _serve(self, request: Request, placed: Route | None) -> None:
        try:
            await self._errands.run(request, placed)
        except asyncio.CancelledError as cause:
            with self._lock:
                self.drop(request, failed(cause))  # unless that is why
            raise
        except Exception as cause:
            with self._lock:
                self.drop(request, cause if isinstance(cause, ChoreoError) else failed(cause))


def _require_sendable(request: Request) -> None:
    pending = request.owner
    if not isinstance(pending, Pending):
        raise InvalidRequestError(
            "keys and values are in the engines elsewhere that compute them: engine.kv can bring none of them here. "
            "Read, keep and adopt KV with an engine in this process"
        )
    call = pending.placed.read.call
    if isinstance(call, Decode) and call.logits_callback is not None:
        raise InvalidRequestError("logits do not leave the engine that computes them: watch needs one in this process")
