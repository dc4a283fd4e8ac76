"""Errors as OpenAI's clients read them."""

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
    EngineClosedError,
    HandleError,
    InvalidRequestError,
    RequestTimeoutError,
    ThreadBusyError,
)

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""By status; of those between, what is the client's to change is an invalid request, and all else the server's."""
_TYPED: tuple[tuple[type[Exception], int, str | None], ...] = (
    (ContextOverflowError, 400, "context_length_exceeded"),
    (ConstraintError, 400, "unfinished_output"),
    (InvalidRequestError, 400, None),
    (AdapterError, 400, None),
    (ThreadBusyError, 409, "thread_busy"),
    (CapacityError, 429, "no_capacity"),
    (RequestTimeoutError, 504, "timeout"),
    (EngineClosedError, 503, "stopping"),
)
_TOO_LONG = "the prompt is too long, it exceeds the context window (context_length_exceeded, maximum context length): "
"""All phrases by which clients know it: some do not look at the code."""
UNKNOWN_HANDLE = "choreo.parents: a handle that names nothing here: leave it out, and say its words in a message"
"""Of one that was forged, is another tenant's, or is forgotten: nobody learns which."""


LOG = logging.getLogger("choreo_server")


class RefusedError(ChoreoError):
    """A request that is not answered.

    Args:
        status: Of HTTP.
        message: Says why, and what to do.
        code: For programs.
        param: The field that it is about.
        asks: How a key is to be sent, of who has sent none.
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


def refused(error: Exception) -> RefusedError:
    """What a client is told of an error. Of our own faults it learns no more than that there was one."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, HandleError):
        return RefusedError(404, UNKNOWN_HANDLE, "handle_not_found", "choreo.parents")
    cause = error.__cause__ if str(error).startswith("Sampling(") else error  # of settings, which are fields
    if isinstance(cause, ValidationError):
        return _of_fields(cause)
    for kind, status, code in _TYPED:
        if isinstance(error, kind):
            return RefusedError(status, _TOO_LONG * (kind is ContextOverflowError) + str(error), code)
    return RefusedError(500, "the server has failed, not the request: its log says how")


def _misled(request: Request, error: HTTPException) -> RefusedError:
    """What somebody is told who asks for what is nowhere, or as nobody does."""
    there = {
        (path := route.path.replace(":path", "")): f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {path}"
        for route in request.app.routes
        if isinstance(route, Route)
    }
    asked = request.url.path[:256]
    near = get_close_matches(asked, there, 1, 0.8)
    return RefusedError(
        error.status_code,
        f"{error.detail}: {request.method} {asked}. Ask {' or '.join([there[near[0]]] if near else there.values())}",
    )


def _of_fields(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False, include_input=False)[0]
    unknown = first.get("ctx", {}).get("field")
    param = ".".join(str(part) for part in (*first["loc"], *(() if unknown is None else (unknown,))))
    return RefusedError(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)


def error_body(error: RefusedError) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


async def as_response(request: Request, error: Exception) -> JSONResponse:
    """An error as the whole answer. A fault of ours is logged: what is no `ChoreoError` by whoever runs the server."""
    known = _misled(request, error) if isinstance(error, HTTPException) else refused(error)
    if known.status == 500 and isinstance(error, ChoreoError):
        LOG.error("a request has failed", exc_info=error)
    headers: Mapping[str, str] = (error.headers if isinstance(error, HTTPException) else None) or {}
    if known.status == 401:
        asked = 'Basic realm="choreo", charset="UTF-8"' if known.asks == "Basic" else "Bearer"
        headers = {"WWW-Authenticate": asked}
    elif known.status in (429, 503):
        headers = {"Retry-After": "1"}
    return JSONResponse(error_body(known), known.status, headers)
