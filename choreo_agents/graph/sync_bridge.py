"""Async work for sync callers, and for callers that may be cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_waiting: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("waiting", default=None)
"""The event loop that stands still until this work is done."""


def stands_still(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Whether an event loop waits for what is run here, so that nothing can be awaited in it."""
    return loop is not None and _waiting.get() is loop


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run async work from sync code: here, or on a thread of its own if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: Future[T] = Future()
    context = contextvars.copy_context()
    context.run(_waiting.set, asyncio.get_running_loop())

    def target() -> None:
        try:
            done.set_result(context.run(asyncio.run, work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=target, name="choreo-sync-bridge", daemon=True).start()
    return done.result()


async def to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """Await work that is not left half-way, as a run that is never half begun; and whether the caller was cancelled
    meanwhile, which an error of the work does not hide."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled() and task.exception() is not None:
        raise cancelled
    return task.result(), cancelled
