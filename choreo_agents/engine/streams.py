"""One decode, token by token."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from choreo_agents.engine.calls import Decode, StreamedToken
from choreo_agents.engine.desk import Desk
from choreo_agents.engine.detokenizer import Detokenizer
from choreo_agents.engine.scope import Scope
from choreo_agents.kv.handle import MessageHandle

_END = object()


async def stream_async(
    desk: Desk, call: Decode, scope: Scope | None, enter: Callable[[Sequence[Decode]], Awaitable[float]]
) -> AsyncGenerator[StreamedToken | MessageHandle]:
    """Yield each token as it comes and the handle last; cancel the decode if the caller leaves early."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Any] = asyncio.Queue()

    def hand_over(item: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody is left to read
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    started = await enter([call])
    [answer] = desk.submit_decodes([call], scope, started, hand_over)
    answer.add_done_callback(lambda _: hand_over(_END))
    detokenizer = Detokenizer(desk.core.model)
    with desk.given_up_if_left([answer], scope):
        while (chosen := await arrived.get()) is not _END:
            yield StreamedToken(chosen.token, detokenizer.add(chosen.token), chosen)
    yield answer.result()


def stream_sync(
    desk: Desk, call: Decode, scope: Scope | None, enter: Callable[[Sequence[Decode]], float]
) -> Iterator[StreamedToken | MessageHandle]:
    """The same for callers without an event loop."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    started = enter([call])
    [answer] = desk.submit_decodes([call], scope, started, arrived.put)
    answer.add_done_callback(lambda _: arrived.put(_END))
    detokenizer = Detokenizer(desk.core.model)
    with desk.given_up_if_left([answer], scope):
        while (chosen := arrived.get()) is not _END:
            yield StreamedToken(chosen.token, detokenizer.add(chosen.token), chosen)
    yield answer.result()
