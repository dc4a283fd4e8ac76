"""Answers to requests, for as long as anybody listens."""

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
from choreo_server.errors import LOG, error_body, refused
from choreo_server.metrics import TokenIntervals

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_ALIVE = b": keep-alive\n\n"
"""No event: clients pass it over, and proxies see that somebody is there."""
BEGINS_S = 0.1
"""Seconds from when the engine was asked until a stream begins, though nothing is said yet: what cannot be answered has
a status of its own before."""
_LOOKS = 50
"""At so many times that it is looked whether the engine was asked; then a stream begins in any case."""
ALIVE_S = 10.0
"""Seconds of silence at most in a stream that has begun."""
Heard = tuple[int, AIMessageChunk]


@dataclass(frozen=True)
class CompletionJob:
    """What is to be answered."""

    calls: Sequence[ChatCall]
    """One for each answer."""
    number: str
    """Of the request."""
    pace: TokenIntervals
    model: str
    """As the server calls it."""
    one_call: bool
    """Whether only the first of several calls of tools is told."""
    with_usage: bool
    """Whether a stream ends with what it cost."""
    patience_s: float
    """Seconds in which a piece of a stream must be taken."""
    hear: Callable[[ChatCall], AsyncGenerator[AIMessageChunk]] = astreamed
    """Asks the engine."""

    def together(self) -> AsyncGenerator[Heard]:
        """The pieces of all answers as they come, each with the place of its call."""
        heard = [self.hear(call) for call in self.calls]
        return _alone(heard[0]) if len(heard) == 1 else _mixed(heard)


class Answer(Response):
    """To one request. When its client has gone, the calls are cancelled.

    Args:
        asked: By the request.
        place: Taken among what is under way, until all is said.
    """

    def __init__(self, asked: CompletionJob, place: AbstractContextManager[None]) -> None:
        super().__init__()
        self._asked, self._place = asked, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await _while_heard(self._told(scope, receive, send), receive)
        if all(call.message for call in self._asked.calls):
            scope[USAGE] = usage_of(self._asked.calls)

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._asked
        async with aclosing(asked.together()) as pieces:
            async for place, chunk in pieces:
                asked.pace.heard(place, asked.calls[place], chunk)
        body = completion(asked.calls, asked.number, asked.model, one_call=asked.one_call)
        await JSONResponse(body)(scope, receive, send)


class Stream(Answer):
    """An answer as it comes.

    Nothing is sent before there is a piece, or a while has gone: what cannot be answered has a status of its own.
    """

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, begun = self._asked, set[int]()
        pieces = Pieces(asked.number, asked.model, one_call=asked.one_call)

        def speakers() -> bytes:
            begun.update(range(len(asked.calls)))
            return b"".join(map(pieces.first, begun))

        wire = _Wire(send, asked.patience_s)
        beating = asyncio.create_task(wire.beat(lambda: all(call.decode for call in asked.calls), speakers))
        try:
            async with aclosing(self._events(pieces, begun)) as events:
                async for event in events:
                    await wire.tell(event)
        except ClientDisconnect:
            return  # without an end, so that the connection is closed
        except Exception as error:
            if not wire.has_begun:
                raise
            known = refused(error)
            if known.status == 500:
                LOG.exception("a stream has failed")
            await wire.tell(f"data: {json.dumps(error_body(known))}\n\n".encode())
        finally:
            beating.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self, pieces: Pieces, begun: set[int]) -> AsyncGenerator[bytes]:
        asked = self._asked
        async with aclosing(asked.together()) as heard:
            async for place, chunk in heard:
                asked.pace.heard(place, asked.calls[place], chunk)
                event = pieces.said(place, chunk)
                if place not in begun:
                    begun.add(place)
                    event = pieces.first(place) + event
                if chunk.chunk_position == "last":
                    event += pieces.last(place, asked.calls[place])
                if event:
                    yield event
        if asked.with_usage:
            yield pieces.usage(asked.calls)


class _Wire:
    """The way of a stream to its client.

    Args:
        send: ASGI's.
        patience_s: Seconds in which a piece must be taken.
    """

    def __init__(self, send: Send, patience_s: float) -> None:
        self.has_begun, self._is_silent = False, True
        self._send, self._patience_s, self._one_at_a_time = send, patience_s, asyncio.Lock()

    async def tell(self, body: bytes) -> None:
        """Send a piece. Raises `ClientDisconnect`: whom it is for does not take it."""
        self._is_silent = False
        begins, self.has_begun = not self.has_begun, True
        async with self._one_at_a_time:
            if begins:
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise ClientDisconnect from None

    async def beat(self, is_asked: Callable[[], bool], begin: Callable[[], bytes]) -> None:
        """Begin it, if nobody has after a while, and send something when there is nothing to tell."""
        with suppress(ClientDisconnect):  # who tells the next piece finds out, too
            for _ in range(_LOOKS):
                may_begin = is_asked()
                await asyncio.sleep(BEGINS_S)
                if may_begin or self.has_begun:
                    break
            if not self.has_begun:
                await self.tell(begin())
            while True:
                self._is_silent = True
                await asyncio.sleep(ALIVE_S)
                if self._is_silent:
                    await self.tell(_ALIVE)


async def _while_heard(work: Awaitable[None], receive: Receive) -> None:
    """Do something, and leave it when whom it is for has gone."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            with suppress(asyncio.CancelledError):
                await doing
    if not doing.cancelled():
        doing.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _alone(said: AsyncGenerator[AIMessageChunk]) -> AsyncGenerator[Heard]:
    async with aclosing(said) as pieces:
        async for piece in pieces:
            yield 0, piece


async def _mixed(answers: Sequence[AsyncGenerator[AIMessageChunk]]) -> AsyncGenerator[Heard]:
    """Where one fails, all are left."""
    arrived: asyncio.Queue[Heard | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_put(place, said, arrived)) for place, said in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _put(
    place: int, said: AsyncGenerator[AIMessageChunk], arrived: asyncio.Queue[Heard | Exception | None]
) -> None:
    try:
        async with aclosing(said) as pieces:
            async for piece in pieces:
                arrived.put_nowait((place, piece))
    except Exception as error:
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)
