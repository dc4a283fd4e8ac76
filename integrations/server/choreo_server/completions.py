"""HTTP responses of chat completions, whole or as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass

from langchain_core.messages import AIMessageChunk
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from choreo_agents.chat import ChatCall, astreamed
from choreo_server.access import USAGE
from choreo_server.answers import Pieces, completion, usage_of
from choreo_server.errors import LOG, as_refusal, error_body
from choreo_server.metrics import TokenIntervals

_TYPE = b"text/event-stream; charset=utf-8"
_HEADERS = [(b"content-type", _TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

_ALIVE = b": keep-alive\n\n"
"""A comment of server-sent events: clients skip it, and proxies see traffic."""
BEGINS_S = 0.1
"""Seconds after the engine has accepted the calls until a stream begins without a token: errors before that still get
an HTTP status of their own."""
_LOOKS = 50
"""Checks, every `BEGINS_S`, whether the engine has accepted the calls; after the last a stream begins in any case."""
ALIVE_S = 10.0
"""Seconds without an event after which a stream gets a keep-alive."""
PlacedChunk = tuple[int, AIMessageChunk]
"""Index of an answer, and a chunk of it."""


@dataclass(frozen=True)
class CompletionJob:
    """A parsed request for chat completions."""

    calls: Sequence[ChatCall]
    """A call for each answer."""
    number: str
    """Id of the request."""
    pace: TokenIntervals
    model: str
    """Name of the model for clients."""
    one_call: bool
    """Whether only the first of several tool calls is returned."""
    with_usage: bool
    """Whether a stream ends with its usage."""
    patience_s: float
    """Seconds in which the client must accept an event."""
    stream: Callable[[ChatCall], AsyncGenerator[AIMessageChunk]] = astreamed
    """Runs a call on the engine."""

    def stream_all(self) -> AsyncGenerator[PlacedChunk]:
        """Yield the chunks of all answers as they come, each with the index of its call."""
        streams = [self.stream(call) for call in self.calls]
        return _with_index(streams[0]) if len(streams) == 1 else _merge(streams)


class Answer(Response):
    """Response with the whole answer. When the client disconnects, the calls are cancelled.

    Args:
        job: The parsed request.
        slot: Counts as concurrent answers until the response has ended.
    """

    def __init__(self, job: CompletionJob, slot: AbstractContextManager[None]) -> None:
        super().__init__()
        self._job, self._slot = job, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slot:
            await _until_disconnect(self._respond(scope, receive, send), receive)
        if all(call.message for call in self._job.calls):
            scope[USAGE] = usage_of(self._job.calls)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        async with aclosing(job.stream_all()) as pieces:
            async for place, chunk in pieces:
                job.pace.observe(place, job.calls[place], chunk)
        body = completion(job.calls, job.number, job.model, one_call=job.one_call)
        await JSONResponse(body)(scope, receive, send)


class Stream(Answer):
    """Response that streams the answer.

    Nothing is sent before the first token or `BEGINS_S`, so that an early error still gets an HTTP status of its own.
    """

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, begun = self._job, set[int]()
        pieces = Pieces(job.number, job.model, one_call=job.one_call)

        def speakers() -> bytes:
            begun.update(range(len(job.calls)))
            return b"".join(map(pieces.first, begun))

        wire = _Wire(send, job.patience_s)
        heartbeat = asyncio.create_task(wire.keep_alive(lambda: all(call.decode for call in job.calls), speakers))
        try:
            async with aclosing(self._events(pieces, begun)) as events:
                async for event in events:
                    await wire.send(event)
        except ClientDisconnect:
            return  # without a last event, so that the connection is closed
        except Exception as error:
            if not wire.has_begun:
                raise
            refusal = as_refusal(error)
            if refusal.status == 500:
                LOG.exception("a stream failed")
            await wire.send(f"data: {json.dumps(error_body(refusal))}\n\n".encode())
        finally:
            heartbeat.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self, pieces: Pieces, begun: set[int]) -> AsyncGenerator[bytes]:
        job = self._job
        async with aclosing(job.stream_all()) as chunks:
            async for place, chunk in chunks:
                job.pace.observe(place, job.calls[place], chunk)
                event = pieces.delta(place, chunk)
                if place not in begun:
                    begun.add(place)
                    event = pieces.first(place) + event
                if chunk.chunk_position == "last":
                    event += pieces.last(place, job.calls[place])
                if event:
                    yield event
        if job.with_usage:
            yield pieces.usage(job.calls)


class _Wire:
    """Connection of a stream to its client.

    Args:
        send: ASGI's `send`.
        patience_s: Seconds in which the client must accept an event.
    """

    def __init__(self, send: Send, patience_s: float) -> None:
        self.has_begun, self._is_silent = False, True
        self._send, self._patience_s, self._lock = send, patience_s, asyncio.Lock()

    async def send(self, body: bytes) -> None:
        """Send an event; raises `ClientDisconnect` if the client does not accept it in time."""
        self._is_silent = False
        begins, self.has_begun = not self.has_begun, True
        async with self._lock:
            if begins:
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise ClientDisconnect from None

    async def keep_alive(self, is_asked: Callable[[], bool], begin: Callable[[], bytes]) -> None:
        """Begin the stream if no token comes soon, then send a keep-alive whenever it is silent for `ALIVE_S`."""
        with suppress(ClientDisconnect):  # sending the next event raises it, too
            for _ in range(_LOOKS):
                may_begin = is_asked()
                await asyncio.sleep(BEGINS_S)
                if may_begin or self.has_begun:
                    break
            if not self.has_begun:
                await self.send(begin())
            while True:
                self._is_silent = True
                await asyncio.sleep(ALIVE_S)
                if self._is_silent:
                    await self.send(_ALIVE)


async def _until_disconnect(work: Awaitable[None], receive: Receive) -> None:
    """Await `work`, and cancel it when the client disconnects."""
    job, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((job, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not job.done():
            job.cancel()
            with suppress(asyncio.CancelledError):
                await job
    if not job.cancelled():
        job.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_index(answer: AsyncGenerator[AIMessageChunk]) -> AsyncGenerator[PlacedChunk]:
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            yield 0, piece


async def _merge(answers: Sequence[AsyncGenerator[AIMessageChunk]]) -> AsyncGenerator[PlacedChunk]:
    """Yield the chunks of several answers as they come; if one fails, all are cancelled."""
    arrived: asyncio.Queue[PlacedChunk | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(place, answer, arrived)) for place, answer in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    place: int, answer: AsyncGenerator[AIMessageChunk], arrived: asyncio.Queue[PlacedChunk | Exception | None]
) -> None:
    try:
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                arrived.put_nowait((place, piece))
    except Exception as error:
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)
