"""Clients of a server that lie, stall and leave, beside one that asks politely and always gets the same answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

from choreo_server import Keys, server_app
from support.serving import CHAT, client_of

from choreo_agents import Engine, Memory
from choreo_agents.models import LoadedModel

_POLITE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What does Ann have?"}],
    "max_tokens": 6,
    "temperature": 1.0,
    "seed": 7,
}
_LIES: tuple[Any, ...] = (
    b"",
    b"{",
    b"[" * 50_000,
    b"\xff\xfe",
    {"messages": []},
    {"messages": "all of them"},
    {"messages": [{"role": "king", "content": "Do it."}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "tool", "content": "42", "tool_call_id": "never"}]},
    _POLITE | {"n": 10**9},
    _POLITE | {"max_tokens": 10**9},
    _POLITE | {"temperature": -1},
    _POLITE | {"model": "../../etc/passwd"},
    _POLITE | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
    _POLITE | {"choreo": {"parents": ["0" * 32]}},
    _POLITE | {"choreo": {"thread": "\x00" * 5000}},
    _POLITE | {"stop": [""] * 1000},
    _POLITE | {"logit_bias": {"a": 5}},
    _POLITE | {"messages": [{"role": "user", "content": "word " * 20_000}]},
)
_KEYS = (None, "k-nobody", "", "k-ann\x00", "k" * 10_000)


def require(holds: bool, why: str) -> None:
    """Raise `AssertionError` unless it holds, under `python -O`, too."""
    if not holds:
        raise AssertionError(why)


class RudeClients:
    """Of one server after the other.

    Args:
        model: It serves.
        counts: What is counted.
    """

    def __init__(self, model: LoadedModel, counts: Counter[str]) -> None:
        self._model, self._counts = model, counts
        self._answer: str | None = None

    async def visit(self, rng: Random) -> None:
        """Have some of them visit a server at once."""
        with Engine.load(self._model, memory=Memory(kv_budget_bytes=1 << 21), salt="served", seed=1) as engine:
            app = server_app(engine, keys=Keys(["k-ann ann", "k-bob bob"]))
            async with app.router.lifespan_context(app):
                visits = [self._visit(app, rng) for _ in range(12)]
                await asyncio.gather(*visits, self._asks_politely(app))
                await self._asks_politely(app)
            engine.check()
            assert engine.admin is not None
            stats = engine.admin.stats()
            require(not stats.unfinished, "a call goes on for somebody who has left")

    async def _asks_politely(self, app: Any) -> None:
        async with client_of(app, "k-ann") as client:
            told = await client.post(CHAT, json=_POLITE)
            require(told.status_code == 200, told.text)
            said = told.json()["choices"][0]["message"]["content"]
        require(self._answer in (None, said), f"another answer beside rude clients: {said!r}, not {self._answer!r}")
        self._answer = said
        self._counts["polite answers, all the same"] += 1

    async def _visit(self, app: Any, rng: Random) -> None:
        how = rng.choice(["lies", "lies", "has no key", "stalls", "leaves"])
        key = rng.choice(_KEYS) if how == "has no key" else rng.choice(["k-ann", "k-bob"])
        lie = rng.choice(_LIES)
        body = lie if isinstance(lie, bytes) else json.dumps(lie).encode()
        polite = json.dumps(_POLITE | {"stream": True, "max_tokens": 200}).encode()
        sent = {"lies": body, "has no key": polite, "stalls": polite[: len(polite) // 2], "leaves": polite}[how]
        status = await _raw(app, sent, key, stalls=how == "stalls", leaves=how == "leaves")
        is_fine = status is None or (status < 500 and (status != 200 or how in ("lies", "leaves")))
        require(is_fine, f"{how} is answered with {status}")
        require(how != "has no key" or status in (400, 401, 403), f"{key!r} is let in: {status}")
        self._counts[f"clients: {how}"] += 1


async def _raw(app: Any, body: bytes, key: str | None, *, stalls: bool, leaves: bool) -> int | None:
    """The status that a request is answered with; None: who asked was not there any more.

    Args:
        app: The server.
        body: As much of it as is sent.
        key: Of a tenant, or not.
        stalls: Whether the rest never comes: the client goes away after a while.
        leaves: Whether the client goes away when it has had a part of the answer.
    """
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": CHAT}
    scope |= {"raw_path": CHAT.encode()}
    scope |= {"query_string": b"", "headers": headers, "server": ("localhost", 80), "client": ("127.0.0.1", 9)}
    scope |= {"scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}
    given: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": stalls}]
    heard = asyncio.Event()
    status: list[int] = []

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop(0)
        if stalls:
            await asyncio.sleep(0.05)
        elif leaves:
            await heard.wait()
        else:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
        elif message.get("body"):
            heard.set()

    await asyncio.wait_for(app(scope, receive, send), 60)
    return status[0] if status else None
