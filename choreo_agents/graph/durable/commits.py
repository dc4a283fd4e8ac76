"""Writes of nodes that end together are one commit.

node a   |ops|........|
node b     |ops|......|           one batch: who came first has the store write all that waits
node c         |ops|..........|   the next
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from langgraph.store.base import PutOp

Write = Callable[[Sequence[PutOp]], Awaitable[object]]


@dataclass(eq=False)
class _Waiting:
    ops: Sequence[PutOp]
    over: Future[Exception | None] = field(default_factory=Future)
    """What the store raised, when it has ended."""

    def __post_init__(self) -> None:
        self.over.set_running_or_notify_cancel()  # who waits for it no longer does not take it back


class Commits:
    """Of one store. May be used from any thread and event loop.

    Args:
        write: Has the store write operations, all in one transaction if it can.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._led = False
        self.count = 0
        """Commits so far."""

    def enqueue(self, ops: Sequence[PutOp]) -> Awaitable[None]:
        """Have operations written, behind all that was enqueued before. Await what is returned at once: it raises what
        the store raised."""
        own = _Waiting(ops)
        with self._lock:
            self._waiting.append(own)
            leads, self._led = not self._led, True
        return self._committed(own, leads=leads)

    async def _committed(self, own: _Waiting, *, leads: bool) -> None:
        error = await (_to_its_end(self._lead(own)) if leads else asyncio.wrap_future(own.over))
        if error is not None:
            raise error

    async def _lead(self, own: _Waiting) -> Exception | None:
        await asyncio.sleep(0)  # those that end in the same turn of the event loop come in
        while True:
            with self._lock:
                together, self._waiting = self._waiting, []
                if not together:
                    self._led = False
                    return own.over.result()
            await self._commit(together)

    async def _commit(self, together: Sequence[_Waiting]) -> None:
        error: Exception | None = None
        try:
            await self._write([op for each in together for op in each.ops])
            self.count += 1
        except Exception as raised:
            error = raised
        if error is not None and len(together) > 1:
            for each in together:  # what cannot be written of one is not the others' fault
                await self._commit([each])
            return
        for each in together:
            each.over.set_result(error)


async def _to_its_end(work: Awaitable[Exception | None]) -> Exception | None:
    """What work gives, which is not left half-way: others wait for it."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
