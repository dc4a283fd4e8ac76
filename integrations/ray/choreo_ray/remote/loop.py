"""Loop that runs requests on remote engines: a router's bookkeeping, without steps of its own."""

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
"""Seconds between two checks for cancelled and expired calls."""


class RemoteLoop:
    """Owner of a thread with an event loop, in which every request is a task (see `RequestLoop`).

    Args:
        dispatcher: Runs a request's task.
        completion: Ends requests.
        lock: Guards all bookkeeping.
        sink: Receives events.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, completion: Completion, lock: AbstractContextManager[None], sink: EventSink
    ) -> None:
        self._dispatcher, self._completion, self._lock = dispatcher, completion, lock
        self._emit = guarded(sink)
        self._active: dict[int, Request] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._spawned: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        dispatcher.attach(self)
        self._thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work on the loop's thread, and wait for it on another one. Raises what `require_open` does."""
        if self._closed:
            work.close()
            self.require_open()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError:
            self.require_open()  # it was closed meanwhile
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests, which are placed together. Raises what `require_open` does."""
        with self._lock:
            self.require_open()
            for request in requests:
                _require_sendable(request)
            for request in requests:
                self._active[request.number] = request
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
        """Observers of steps: always none, since steps are made by remote engines."""
        return []

    def answers(self) -> bool:
        """Return whether remote engines can still answer: always, since a lost one may come back."""
        return True

    def wake(self) -> None:
        """Do nothing: no request here waits for files."""

    def raise_priority(self, request: Request, priority: int) -> None:
        """Give a request a higher priority, wherever it is."""
        if priority > request.priority:
            request.priority = priority
            self.soon(lambda: self.spawn(self._dispatcher.raise_priority(request)))

    def soon(self, work: Callable[[], object]) -> None:
        """Run work on the loop's thread, or not at all once it is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(work)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task that nobody waits for. On the loop's thread."""
        task = self._loop.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`."""
        error = EngineClosedError("the tenancy was closed before this call was done")
        with self._lock:
            for request in self.requests_of(tenant):
                self.drop(request, error)

    @property
    def is_here(self) -> bool:
        """True on the loop's own thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        """Return the number of requests that wait or run."""
        return len(self._active)

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._active.values() if request.tenant == tenant]

    def close(self) -> None:
        """Fail unfinished requests with `EngineClosedError`, release what engines hold for the router, and end the
        thread.
        """
        with self._lock:
            if self._closed:
                return
            for request in list(self._active.values()):
                self.drop(request, EngineClosedError("the engine was closed before this call was done"))
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_here:
            self._thread.join()

    def finish(self, request: Request) -> None:
        """Complete a request. Under the lock."""
        del self._active[request.number]
        self._completion.finish(request)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """End a request without a result. Under the lock."""
        if request.over:
            return
        self._active.pop(request.number, None)
        self._completion.drop(request, error, outcome)
        if (task := self._tasks.get(request.number)) is not None:
            self.soon(task.cancel)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watch = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._dispatcher.leave())
        finally:
            watch.cancel()
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _watch(self) -> None:
        """Drop requests that nobody waits for any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            with self._lock:
                self._drop_left()

    def _drop_left(self) -> None:
        now = time.perf_counter()
        for request in list(self._active.values()):
            late = request.pop_expired(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call was not done in time: see its timeout_s"))
            if request.cancelled():
                self.drop(request, None, "timed out" if late else "cancelled")

    def _begin(self, requests: Sequence[Request]) -> None:
        with self._lock:  # one after the other, before any runs: each placement counts the ones before
            self._drop_left()
            for request in requests:
                if request.over:
                    continue
                try:
                    route = self._dispatcher.place(request)
                except Exception as cause:
                    self.drop(request, cause if isinstance(cause, ChoreoError) else failed(cause))
                    continue
                task = self._tasks[request.number] = self._loop.create_task(self._serve(request, route))
                task.add_done_callback(partial(self._on_done, request.number))

    def _on_done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        with self._lock:  # a task that is cancelled before its first step never calls `over`
            self._dispatcher.over(number)

    async def _serve(self, request: Request, route: Route | None) -> None:
        try:
            await self._dispatcher.run(request, route)
        except asyncio.CancelledError as cause:
            with self._lock:
                self.drop(request, failed(cause))  # does nothing if a drop has cancelled the task
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
