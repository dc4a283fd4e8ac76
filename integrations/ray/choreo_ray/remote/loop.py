"""Loop that runs requests on remote engines: a router's bookkeeping, without steps of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from choreo_agents import Decode
from choreo_agents.engine.delegation import ActiveRequests, PlacedCall, Request
from choreo_agents.errors import EngineClosedError, InvalidRequestError
from choreo_ray.remote.context import RouterContext
from choreo_ray.remote.dispatcher import RequestDispatcher
from choreo_ray.remote.routing import Route

LOOK_S = 0.02
"""Seconds between two checks for cancelled and expired calls."""


class RemoteLoop:
    """Owner of the thread of the router's event loop, in which every request is a task (see `RequestLoop`).

    Args:
        context: The router's.
        dispatcher: Runs a request's task.
        active: Unfinished requests.
    """

    def __init__(self, context: RouterContext, dispatcher: RequestDispatcher, active: ActiveRequests) -> None:
        self._context, self._dispatcher, self._active = context, dispatcher, active
        self._lock, self._loop = context.lock, context.events
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._run, name="choreo-engine", daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work on the loop's thread, and wait for it on another one. Raises what `require_open` does."""
        if self._context.is_closed:
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
            self._active.add_elsewhere(requests)
        if requests:
            self._context.soon(lambda: self._begin(requests))

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the engine was closed."""
        if self._context.is_closed:
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
            self._dispatcher.raise_priority(request)

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`."""
        with self._lock:
            self._active.drop_tenant(tenant)
            self._active.drop_abandoned()

    @property
    def is_here(self) -> bool:
        """True on the loop's own thread."""
        return self._thread is threading.current_thread()

    def unfinished(self) -> int:
        """Return the number of requests that wait or run."""
        return len(self._active)

    def requests_of(self, tenant: str) -> list[Request]:
        """A tenant's unfinished requests. Under the lock."""
        return [request for request in self._active if request.tenant == tenant]

    def close(self) -> None:
        """Fail unfinished requests with `EngineClosedError`, release what engines hold for the router, and end the
        thread.
        """
        with self._lock:
            if self._context.is_closed:
                return
            self._active.drop_all(EngineClosedError("the engine was closed before this call finished"))
            self._context.is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_here:
            self._thread.join()

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
                self._active.drop_abandoned()

    def _begin(self, requests: Sequence[Request]) -> None:
        with self._lock:  # one after the other, before any runs: each placement counts the ones before
            self._active.drop_abandoned()
            for request in requests:
                if request.over:
                    continue
                try:
                    route = self._dispatcher.place(request)
                except Exception as cause:
                    self._active.fail(request, cause)
                    continue
                task = self._tasks[request.number] = self._loop.create_task(self._serve(request, route))
                task.add_done_callback(partial(self._on_done, request.number))
                request.stop = partial(self._context.soon, task.cancel)

    def _on_done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        with self._lock:  # a task that is cancelled before its first step never calls `over`
            self._dispatcher.over(number)

    async def _serve(self, request: Request, route: Route | None) -> None:
        try:
            await self._dispatcher.run(request, route)
        except BaseException as cause:
            with self._lock:
                self._active.fail(request, cause)  # does nothing if a drop has cancelled the task
            if not isinstance(cause, Exception):
                raise


def _require_sendable(request: Request) -> None:
    placed = request.owner
    if not isinstance(placed, PlacedCall):
        raise InvalidRequestError(
            "KV is on remote engines, where engine.kv cannot read it: use an engine in this process"
        )
    call = placed.read.call
    if isinstance(call, Decode) and call.logits_callback is not None:
        raise InvalidRequestError("logits stay on the remote engine: logits_callback needs an engine in this process")
