"""Converts exceptions to HTTP errors in the format that OpenAI's clients read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from langchain_core.exceptions import ContextOverflowError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from choreo_agents.errors import (
    AdapterError,
    CapacityError,
    ChoreoError,
    ConstraintError,
    DeviceLostError,
    EngineClosedError,
    EngineLostError,
    HandleError,
    InvalidRequestError,
    RequestTimeoutError,
    ThreadBusyError,
)

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Error types by status; any other status below 500 is an invalid request, from 500 on a server error."""
_TYPED: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int, str | None], ...] = (
    (ContextOverflowError, 400, "context_length_exceeded"),
    (ConstraintError, 400, "unfinished_output"),
    ((InvalidRequestError, AdapterError), 400, None),
    (ThreadBusyError, 409, "thread_busy"),
    (CapacityError, 429, "no_capacity"),
    (RequestTimeoutError, 504, "timeout"),
    (EngineClosedError, 503, "stopping"),
    ((EngineLostError, DeviceLostError), 503, "engine_lost"),
)
_TOO_LONG = "the prompt is too long, it exceeds the context window (context_length_exceeded, maximum context length): "
"""Message with all phrases by which clients recognise the error: some do not look at the code."""
UNKNOWN_HANDLE = "choreo.parents: unknown handle: leave it out, and send its text in a message"
"""Message for a handle that is forged, another tenant's or released: the client must not learn which."""


LOG = logging.getLogger("choreo_server")


class RefusedError(ChoreoError):
    """A request that is rejected.

    Args:
        status: HTTP status.
        message: Reason and remedy, for people.
        code: Reason, for programs.
        param: Field of the request.
        asks: Authentication scheme that a 401 asks for.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        asks: Literal["Bearer", "Basic"] = "Bearer",
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.asks = status, code, param, asks


def as_refusal(error: Exception) -> RefusedError:
    """Convert an exception to the error that the client gets; an internal one without details."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, HandleError):
        return RefusedError(404, UNKNOWN_HANDLE, "handle_not_found", "choreo.parents")
    cause = error.__cause__ if str(error).startswith("Sampling(") else error  # its fields are fields of the request
    if isinstance(cause, ValidationError):
        return _validation_refusal(cause)
    for kind, status, code in _TYPED:
        if isinstance(error, kind):
            return RefusedError(status, _TOO_LONG * (kind is ContextOverflowError) + str(error), code)
    return RefusedError(500, "internal server error: see the server's log")


def _not_routed(request: Request, error: HTTPException) -> RefusedError:
    """Return the error for an unknown path or method, with the nearest route, or else all routes."""
    routes = {
        (path := route.path.replace(":path", "")): f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {path}"
        for route in request.app.routes
        if isinstance(route, Route)
    }
    target = request.url.path[:256]
    near = get_close_matches(target, routes, 1, 0.8)
    others = " or ".join([routes[near[0]]] if near else routes.values())
    return RefusedError(error.status_code, f"{error.detail}: {request.method} {target}. Use {others}")


def _validation_refusal(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False, include_input=False)[0]
    unknown = first.get("ctx", {}).get("field")
    param = ".".join(str(part) for part in (*first["loc"], *(() if unknown is None else (unknown,))))
    return RefusedError(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


async def as_response(request: Request, error: Exception) -> JSONResponse:
    """Return an exception as the response, and log an internal `ChoreoError`; Starlette re-raises other exceptions."""
    refusal = _not_routed(request, error) if isinstance(error, HTTPException) else as_refusal(error)
    if refusal.status == 500 and isinstance(error, ChoreoError):
        LOG.error("a request failed", exc_info=error)
    headers: Mapping[str, str] = (error.headers if isinstance(error, HTTPException) else None) or {}
    if refusal.status == 401:
        scheme = 'Basic realm="choreo", charset="UTF-8"' if refusal.asks == "Basic" else "Bearer"
        headers = {"WWW-Authenticate": scheme}
    elif refusal.status in (429, 503):
        headers = {"Retry-After": "1"}
    return JSONResponse(error_body(refusal), refusal.status, headers)
