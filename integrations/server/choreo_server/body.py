"""Reads request bodies, and rejects those that are too large before they are parsed."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from choreo_server.errors import RefusedError
from choreo_server.limits import Limits

_SIGNS = re.compile(rb'"(?:[^"\\]++|(?:\\.)++)*+["\\]?|[\[\]{},]', re.DOTALL)
"""JSON punctuation and strings. A string without an end is one match, too: else it would be scanned again from each
quotation mark in it, in quadratic time."""
_SIGNS_OF_A_MESSAGE = 32
"""Matches per message, on average over a long conversation with tools, arguments and content parts."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the whole body within the limits.

    Raises:
        RefusedError: The body is too large (known before a byte is read if the client sends its length), takes too
            long, or has too many messages.
        ClientDisconnect: The client has gone.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
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
    return RefusedError(413, f"a request may have {most:g} MB at most (--max-body-mb): send fewer or shorter messages")


def require_few(body: bytes, most: int) -> None:
    """Reject a JSON object with a list of more than `most` elements, without parsing it.

    Only punctuation is scanned, up to `_SIGNS_OF_A_MESSAGE` for each of `most` elements; beyond, the body is rejected.

    Raises:
        RefusedError: The list, or the body, is too long.
    """
    if body.count(b",") < most:
        return
    depth = elements = 0
    for number, sign in enumerate(_SIGNS.finditer(body)):
        char = body[sign.start()]
        if char in b"[{":
            depth += 1
            # Depth 1 is the request, depth 2 a list in it, such as `messages`.
            elements = 1 if depth == 2 else elements
        elif char in b"]}":
            depth -= 1
        elif char == ord(",") and depth == 2:
            elements += 1
        if elements > most or number > most * _SIGNS_OF_A_MESSAGE:
            raise RefusedError(413, f"at most {most} messages are allowed (--max-messages): leave the oldest out")
