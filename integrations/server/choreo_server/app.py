"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from choreo_agents import Engine
from choreo_agents.errors import ChoreoError, InvalidRequestError
from choreo_server.access import Access
from choreo_server.asking import ChatBody
from choreo_server.body import read_body
from choreo_server.completions import Answer, CompletionJob, Stream
from choreo_server.errors import RefusedError, as_response
from choreo_server.limits import Limits
from choreo_server.looking import Looking
from choreo_server.metrics import CONTENT_TYPE, TokenIntervals, Waits, exposition
from choreo_server.recording import Recording
from choreo_server.tenancy import Keys, Tenancy

_LARGE = 1 << 16
"""Bytes above which a request is parsed on a thread, so that the event loop is not blocked."""


def server_app(
    engine: Engine,
    *,
    name: str | None = None,
    keys: Keys | None = None,
    limits: Limits | None = None,
    called: Iterable[str] = (),
    recordings: Path | None = None,
    records: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> ServerApp:
    """Return the server as an ASGI application; it does not close the engine.

    Args:
        engine: An engine from `Engine.load`.
        name: Name of the model for clients; None: the engine's name.
        keys: API keys of the tenants; None: everybody who can reach the server may call.
        limits: Limits on requests.
        called: Host names that clients without keys may use, besides addresses, this machine's name and `localhost`.
            Other names are rejected, to prevent DNS rebinding.
        recordings: Directory whose recordings are shown at `/inspect`: a tenant sees those in the sub-directory of its
            name; without keys, everybody sees those in the directory.
        records: Whether served calls are recorded there.
        adapters: Directories of adapters, by the names that clients use as model names.

    Raises:
        AdapterError: An adapter is another model's, or its files are damaged.
        InvalidRequestError: `records` is set without `recordings`, or an adapter has the model's name.
    """
    if records and recordings is None:
        raise InvalidRequestError("there is no folder for recordings: pass --recordings")
    keys, limits = keys or Keys(), limits or Limits()
    names = name or engine.model.name, *(adapters or ())
    if names[0] in names[1:]:
        raise InvalidRequestError(f"{names[0]!r} is the model: rename its adapter (--adapter NAME=FOLDER)")
    tenancy = Tenancy(engine, keys, limits.tenant_calls_per_second, called, adapters)
    recording = Recording(recordings) if records and recordings is not None else None
    return ServerApp(engine, names, tenancy, limits, Looking(recordings, tenancy), recording)


class ServerApp(Starlette):
    """The ASGI application of a server; see `server_app`."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        tenancy: Tenancy,
        limits: Limits,
        looking: Looking,
        recording: Recording | None,
    ) -> None:
        self.stopping = False
        """Whether new requests are rejected; those in progress end."""
        self.answers = 0
        """Number of answers in progress."""
        self._tenants_answers = Counter[str | None]()
        """Number of answers in progress by tenant."""
        self._engine, self._limits = engine, limits
        self._name, *self._adapters = self._names = names
        self._tenancy, self._requests, self._since = tenancy, Counter[int](), int(time.time())
        self._recording, self._waits = recording, Waits()
        super().__init__(
            routes=[
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/inspect", looking.index),
                Route("/inspect/{name}", looking.page),
            ],
            lifespan=self._until_end,
            exception_handlers=dict.fromkeys((ChoreoError, ValidationError, HTTPException, Exception), as_response),
        )

    def build_middleware_stack(self) -> ASGIApp:
        # Outermost, because Starlette's outermost middleware makes the responses for unhandled errors.
        return Access(super().build_middleware_stack(), self._requests)

    @asynccontextmanager
    async def _until_end(self, _: Starlette) -> AsyncIterator[None]:
        yield
        if self._recording is not None:
            self._recording.close()

    async def _completions(self, request: Request) -> Response:
        engine, pace = self._tenancy.engine(request), TokenIntervals(self._waits)
        self._require_open()
        try:
            body = await read_body(request, self._limits)
        except ClientDisconnect:
            return Response(status_code=499)
        number = f"chatcmpl-{uuid.uuid4().hex}"
        parse = partial(self._parse, body, engine, number, pace)
        job, kind = await asyncio.to_thread(parse) if len(body) > _LARGE else parse()
        if self._recording is not None:
            job = replace(job, stream=partial(self._recording.astreamed, self._tenancy.name(request)))
        return kind(job, self._count_answers(len(job.calls), self._tenancy.name(request)))

    def _parse(
        self, body: bytes, engine: Engine, number: str, pace: TokenIntervals
    ) -> tuple[CompletionJob, type[Answer]]:
        """Parse a request and choose the response class; raises as `ChatBody.calls` does, and `ValidationError`."""
        parsed = ChatBody.model_validate_json(body)
        if parsed.model not in (None, *self._names):
            raise _no_model(parsed.model)
        adapter = parsed.model if parsed.model in self._adapters else None
        job = CompletionJob(
            calls=parsed.calls(engine, number, self._limits, adapter),
            number=number,
            pace=pace,
            model=parsed.model or self._name,
            one_call=parsed.parallel_tool_calls is False,
            with_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
            patience_s=self._limits.body_s,
        )
        return job, Stream if parsed.stream else Answer

    @contextmanager
    def _count_answers(self, answers: int, tenant: str | None) -> Iterator[None]:
        """Count answers of a tenant as in progress during the block; the tenant is None without keys.

        Raises:
            RefusedError: There would be too many.
        """
        self._require_open()
        own, most = self._tenants_answers[tenant], self._limits.tenant_answers
        if tenant is not None and most is not None and own + answers > most:
            if answers > most:
                raise RefusedError(400, f"n: you may have at most {most} answers in progress", param="n")
            raise RefusedError(429, f"you have {own} answers in progress, of {most}: wait for them", "no_capacity")
        if self.answers + answers > self._limits.answers:
            raise RefusedError(429, f"{self.answers} answers are in progress: try again", "too_many_requests")
        self.answers += answers
        self._tenants_answers[tenant] += answers
        try:
            yield
        finally:
            self.answers -= answers
            self._tenants_answers[tenant] -= answers

    def _require_open(self) -> None:
        if self.stopping:
            raise RefusedError(503, "the server is stopping: try another, or this one after its restart", "stopping")

    async def _models(self, request: Request) -> Response:
        self._tenancy.engine(request)
        return JSONResponse({"object": "list", "data": [*map(self._describe, self._names)]})

    async def _model(self, request: Request) -> Response:
        self._tenancy.engine(request)
        if (name := request.path_params["name"]) not in self._names:
            raise _no_model(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, object]:
        longest = self._engine.model.adapter.max_positions
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "choreo",
            "max_model_len": longest,
        }

    async def _health(self, _: Request) -> Response:
        self._require_open()
        if (owner := self._engine.admin) is not None:
            await asyncio.to_thread(owner.require_ready)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        engine = self._tenancy.engine(request)
        if self._tenancy.sees_all(request) and (owner := self._engine.admin) is not None:
            text = exposition(owner.stats(), self._requests, self.answers, self._waits)
        else:
            text = exposition(engine.stats(), None, None)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)


def _no_model(name: object) -> RefusedError:
    return RefusedError(
        404, f"no model {str(name)[:200]!r} is served here: GET /v1/models lists them", "model_not_found", "model"
    )
