"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
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
from choreo_server.body import body_of
from choreo_server.completions import Answer, CompletionJob, Stream
from choreo_server.errors import RefusedError, as_response
from choreo_server.limits import Limits
from choreo_server.looking import Looking
from choreo_server.metrics import CONTENT_TYPE, TokenIntervals, Waits, exposition
from choreo_server.recording import Recording
from choreo_server.tenancy import Keys, Tenancy

_LARGE = 1 << 16
"""Bytes of a request from which on it is read on a thread, while the event loop goes on."""


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
    """The server over an engine, which it does not close.

    Args:
        engine: That `Engine.load` has returned.
        name: What clients call the model; None: as the engine does.
        keys: Of its tenants; None: whoever reaches it may call.
        limits: How much it takes.
        called: Names by which programs may call it without keys, beside its address, the machine's own and `localhost`:
            any other may be a web site's that has been made to lead here.
        recordings: A folder whose recordings are shown at `/inspect`: to a tenant those in the folder of its name, and
            without keys those in it.
        records: Whether it records there what it answers: what the page shows are then the tenants' own requests.
        adapters: Folders of adapters, by names that clients call them by in the place of the model's.

    Raises:
        AdapterError: An adapter is another model's, or its files are damaged.
        InvalidRequestError: It is to record, and there is no folder.
    """
    if records and recordings is None:
        raise InvalidRequestError("name the folder of recordings, in which it is to record (--recordings)")
    keys, limits = keys or Keys(), limits or Limits()
    names = name or engine.model.name, *(adapters or ())
    if names[0] in names[1:]:
        raise InvalidRequestError(f"{names[0]!r} is the model: call its adapter something else (--adapter NAME=FOLDER)")
    tenancy = Tenancy(engine, keys, limits.tenant_calls_per_second, called, adapters)
    recording = Recording(recordings) if records and recordings is not None else None
    return ServerApp(engine, names, tenancy, limits, Looking(recordings, tenancy), recording)


class ServerApp(Starlette):
    """See `server_app`."""

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
        """Whether new requests are refused: those under way end."""
        self.answers = 0
        """Under way now."""
        self._tenants_answers = Counter[str | None]()
        """Likewise, by tenant."""
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
            lifespan=_recorded(recording),
            exception_handlers=dict.fromkeys((ChoreoError, ValidationError, HTTPException, Exception), as_response),
        )

    def build_middleware_stack(self) -> ASGIApp:
        # Around all else: what has failed is told by the outermost of Starlette's own.
        return Access(super().build_middleware_stack(), self._requests)

    async def _completions(self, request: Request) -> Response:
        engine, pace = self._tenancy.engine(request), TokenIntervals(self._waits)
        self._require_open()
        try:
            body = await body_of(request, self._limits)
        except ClientDisconnect:
            return Response(status_code=499)
        number = f"chatcmpl-{uuid.uuid4().hex}"
        is_large = len(body) > _LARGE
        asked, kind = (
            await asyncio.to_thread(self._read, body, engine, number, pace)
            if is_large
            else self._read(body, engine, number, pace)
        )
        if self._recording is not None:
            asked = replace(asked, hear=partial(self._recording.astreamed, self._tenancy.name(request)))
        return kind(asked, self._under_way(len(asked.calls), self._tenancy.name(request)))

    def _read(
        self, body: bytes, engine: Engine, number: str, pace: TokenIntervals
    ) -> tuple[CompletionJob, type[Answer]]:
        """What a request asks, and how it is answered. Raises what `ChatBody.calls` raises, and `ValidationError`."""
        told = ChatBody.model_validate_json(body)
        if told.model not in (None, *self._names):
            raise _no_model(told.model)
        adapter = told.model if told.model in self._adapters else None
        asked = CompletionJob(
            calls=told.calls(engine, number, self._limits, adapter),
            number=number,
            pace=pace,
            model=told.model or self._name,
            one_call=told.parallel_tool_calls is False,
            with_usage=bool(told.stream_options and told.stream_options.include_usage),
            patience_s=self._limits.body_s,
        )
        return asked, Stream if told.stream else Answer

    @contextmanager
    def _under_way(self, answers: int, tenant: str | None) -> Iterator[None]:
        """A block in which so many answers more are, of a tenant or, without keys, of nobody known.

        Raises:
            RefusedError: They would be too many.
        """
        self._require_open()
        own, most = self._tenants_answers[tenant], self._limits.tenant_answers
        if tenant is not None and most is not None and own + answers > most:
            if answers > most:
                raise RefusedError(400, f"n: at most {most} answers of yours may be under way", param="n")
            raise RefusedError(429, f"{own} of your answers are under way, of {most}: wait for them", "no_capacity")
        if self.answers + answers > self._limits.answers:
            raise RefusedError(429, f"{self.answers} answers are under way, of all: try again", "too_many_requests")
        self.answers += answers
        self._tenants_answers[tenant] += answers
        try:
            yield
        finally:
            self.answers -= answers
            self._tenants_answers[tenant] -= answers

    def _require_open(self) -> None:
        if self.stopping:
            raise RefusedError(503, "the server is stopping: ask another, or this one when it is back", "stopping")

    async def _models(self, request: Request) -> Response:
        self._tenancy.engine(request)
        return JSONResponse({"object": "list", "data": [*map(self._described, self._names)]})

    async def _model(self, request: Request) -> Response:
        self._tenancy.engine(request)
        if (name := request.path_params["name"]) not in self._names:
            raise _no_model(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, object]:
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
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        engine = self._tenancy.engine(request)
        owner = self._engine.admin
        if self._tenancy.sees_all(request) and owner is not None:
            text = exposition(owner.stats(), self._requests, self.answers, self._waits)
        else:
            text = exposition(engine.stats(), None, None)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)


def _recorded(recording: Recording | None) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def until_the_end(_: Starlette) -> AsyncIterator[None]:
        yield
        if recording is not None:
            recording.close()

    return until_the_end


def _no_model(name: object) -> RefusedError:
    return RefusedError(
        404, f"no model {str(name)[:200]!r} is served here: GET /v1/models tells which", "model_not_found", "model"
    )
