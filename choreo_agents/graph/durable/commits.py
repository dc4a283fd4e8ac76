"""Writes of nodes that end together are one commit.

node a   |ops|........|
node b     |ops|......|           one batch: who came first has the store write all that waits
node c         |ops|..........|   the next: the first of those who wait leads
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from langgraph.store.base import PutOp

from choreo_agents.errors import StoreError
from choreo_agents.graph.sync_bridge import to_its_end

Write = Callable[[Sequence[PutOp]], Awaitable[object]]


@dataclass(eq=False)
class _Waiting:
    ops: Sequence[PutOp]
    turn: Future[bool] = field(default_factory=Future)
    """True: it is over. False: its caller leads now."""
    error: Exception | None = None
    """What the store raised."""
    is_left: bool = False
    """Whether its caller waits no longer."""

    def __post_init__(self) -> None:
        self.turn.set_running_or_notify_cancel()  # who waits for it no longer does not take it back

    def end(self, error: Exception | None) -> None:
        self.error = error
        if not self.turn.done():
            self.turn.set_result(True)


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
        if leads or not await self._turn(own):
            _, cancelled = await to_its_end(self._lead())
            if cancelled is not None:
                raise cancelled
        if own.error is not None:
            raise own.error

    async def _turn(self, own: _Waiting) -> bool:
        try:
            return await asyncio.wrap_future(own.turn)
        except asyncio.CancelledError:
            with self._lock:
                own.is_left = True
            if own.turn.done() and not own.turn.result():
                self._hand_over()
            raise

    async def _lead(self) -> None:
        together: list[_Waiting] = []
        try:
            await asyncio.sleep(0)  # those that end in the same turn of the event loop come in
            with self._lock:
                together, self._waiting = self._waiting, []
            await self._commit(together)
        except BaseException:  # its event loop ends
            for each in together:
                if not each.turn.done() or each.error is None:
                    each.end(StoreError("a commit of the run's lineage was broken off: run it again"))
            raise
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the first who waits still lead; what only others wait for is written with what comes next."""
        with self._lock:
            following = next((each for each in self._waiting if not each.is_left), None)
            self._led = following is not None
        if following is not None:
            following.turn.set_result(False)

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
            each.end(error)
