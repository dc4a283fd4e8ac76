"""Async work for sync callers."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run async work from sync code: here, or on a thread of its own if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def target() -> None:
        try:
            done.set_result(context.run(asyncio.run, work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=target, name="choreo-sync-bridge", daemon=True).start()
    return done.result()
