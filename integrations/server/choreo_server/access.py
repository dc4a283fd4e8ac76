"""ASGI middleware that gives each request an id, a line in the access log, and a count by status."""

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
"""Key in a request's scope: the usage of its answers, once they are complete."""
_NAME = "x-request-id"
_IS_NAME = re.compile(r"[!-~]{1,128}")
"""Ids that are taken from clients: anything else could forge lines of the log."""


class Access:
    """ASGI middleware for ids, access log and counts of requests.

    Args:
        app: The application.
        requests: Counts of requests by status.
    """

    def __init__(self, app: ASGIApp, requests: Counter[int]) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), 499  # 499: the client leaves before a response
        header = Headers(scope=scope).get(_NAME, "")
        request_id = header if _IS_NAME.fullmatch(header) else uuid.uuid4().hex

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._requests[status] += 1
                MutableHeaders(scope=message)[_NAME] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            used = scope.get(USAGE, {})
            LOG.info(
                "request=%s method=%s path=%s status=%d prompt_tokens=%s completion_tokens=%s duration_s=%.3f",
                request_id,
                scope["method"],
                quote(scope["path"]),
                status,
                used.get("prompt_tokens", "-"),
                used.get("completion_tokens", "-"),
                time.perf_counter() - began_s,
            )
