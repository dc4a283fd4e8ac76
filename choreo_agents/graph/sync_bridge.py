"""Async work for sync callers, and work that cancellation must not interrupt."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_waiting: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("waiting", default=None)
"""Event loop that is blocked until this work is done."""


def is_blocked(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Return whether an event loop is blocked by the caller of this work, so that awaiting it would deadlock."""
    return loop is not None and _waiting.get() is loop


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run async work from sync code: in this thread, or in a new one if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    future: Future[T] = Future()
    context = contextvars.copy_context()
    context.run(_waiting.set, asyncio.get_running_loop())

    def target() -> None:
        try:
            future.set_result(context.run(asyncio.run, work))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, name="choreo-sync-bridge", daemon=True).start()
    return future.result()


async def run_to_end(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """Await work to its end even if the caller is cancelled, and return its result and the cancellation, if any.

    If the work fails after a cancellation, the cancellation is raised.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled() and task.exception() is not None:
        raise cancelled
    return task.result(), cancelled
