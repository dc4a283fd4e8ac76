"""What every request to a server gets, whatever becomes of it: a name, a line in the log, and its place in a count."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("choreo_server.access")
USAGE = "choreo_server.usage"
"""In a request's scope: what its answers cost, once all is said."""
_NAME = "x-request-id"
_IS_NAME = re.compile(r"[!-~]{1,128}")
"""Any other might be more than one line of a log."""


class Access:
    """An ASGI application whose answers are named, logged, and counted by their status.

    Args:
        app: The application.
        requests: Where they are counted.
    """

    def __init__(self, app: ASGIApp, requests: Counter[int]) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), 499  # whoever leaves before is told nothing
        told = Headers(scope=scope).get(_NAME, "")
        name = told if _IS_NAME.fullmatch(told) else uuid.uuid4().hex

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._requests[status] += 1
                MutableHeaders(scope=message)[_NAME] = name
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            used = scope.get(USAGE, {})
            LOG.info(
                "request=%s method=%s path=%s status=%d prompt_tokens=%s completion_tokens=%s duration_s=%.3f",
                name,
                scope["method"],
                quote(scope["path"]),
                status,
                used.get("prompt_tokens", "-"),
                used.get("completion_tokens", "-"),
                time.perf_counter() - began_s,
            )
