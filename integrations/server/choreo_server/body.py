"""A request's body, which is refused for its size before anything is made of it."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from choreo_server.errors import RefusedError
from choreo_server.limits import Limits

_SIGNS = re.compile(rb'"(?:[^"\\]++|(?:\\.)++)*+["\\]?|[\[\]{},]', re.DOTALL)
"""Whatever tells one value of a JSON text from the next; a string, whatever it holds, is one such sign. So is one that
nothing ends: else it would be looked through anew from each quotation mark in it."""
_SIGNS_OF_A_MESSAGE = 32
"""Of a conversation with many, on average: tools, their arguments and parts are spread over all of them."""


async def body_of(request: Request, limits: Limits) -> bytes:
    """The whole body, no larger than it may be.

    Raises:
        RefusedError: It is larger, which its length tells before a byte is read; it takes too long; or it has too many
            messages.
        ClientDisconnect: Nobody sends the rest.
    """
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limits.body_bytes:
        raise _too_large(limits)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.stream():
                size += len(piece)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                pieces.append(piece)
    except TimeoutError:
        raise RefusedError(408, f"the request took longer than {limits.body_s:g} s to arrive: send it again") from None
    body = b"".join(pieces)
    require_few(body, limits.messages)
    return body


def _too_large(limits: Limits) -> RefusedError:
    most = limits.body_bytes / (1 << 20)
    return RefusedError(413, f"a request may be {most:g} MB large (--max-body-mb): send fewer or shorter messages")


def require_few(body: bytes, most: int) -> None:
    """Refuse a list that stands in a JSON object and has more than so many elements, without reading the text as JSON.

    It is looked at sign by sign, and no longer than as many messages can have signs: what has more is refused as well.

    Raises:
        RefusedError: It has.
    """
    if body.count(b",") < most:
        return
    depth = elements = 0
    for number, sign in enumerate(_SIGNS.finditer(body)):
        what = body[sign.start()]
        if what in b"[{":
            depth += 1
            elements = 1 if depth == 2 else elements
        elif what in b"]}":
            depth -= 1
        elif what == ord(",") and depth == 2:
            elements += 1
        if elements > most or number > most * _SIGNS_OF_A_MESSAGE:
            raise _too_many(most)


def _too_many(most: int) -> RefusedError:
    return RefusedError(413, f"a request may have {most} messages (--max-messages): leave the oldest out")
