"""What the server's tests share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from choreo_server import server_app
from starlette.types import ASGIApp

from choreo_agents import Engine

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Which of the candidates do you vote for?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather at a location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "maxLength": 20}},
            "required": ["location"],
        },
    },
}


@asynccontextmanager
async def client_of(app: Engine | ASGIApp, key: str | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process."""
    served = server_app(app, **options) if isinstance(app, Engine) else app
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


async def asked(client: httpx.AsyncClient, status: int = 200, /, **fields: Any) -> Any:
    """What a request is answered."""
    response = await client.post(CHAT, json={"messages": QUESTION} | fields)
    assert response.status_code == status, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, /, **fields: Any) -> list[dict[str, Any]]:
    """The events of an answer, which ends as it should."""
    response = await client.post(CHAT, json={"messages": QUESTION, "stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def added_up(events: list[dict[str, Any]], place: int = 0) -> dict[str, Any]:
    """One answer, of its pieces."""
    message: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for choice in (each for event in events for each in event["choices"] if each["index"] == place):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            for name, text in piece["function"].items():
                call[name] += text
        message["finish_reason"] = choice["finish_reason"]
    return message | ({"calls": [*calls.values()]} if calls else {})


class Talk:
    """One request to an ASGI application, by somebody who may leave at any time."""

    def __init__(self, app: ASGIApp, body: Mapping[str, Any]) -> None:
        self._app, self._body = app, json.dumps(body).encode()
        self._left = asyncio.Event()
        self.heard: list[bytes] = []
        self.status: int | None = None
        self.something = asyncio.Event()
        self.takes = asyncio.Event()
        """Whether what is said to it is read."""
        self.takes.set()

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": self._body}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.heard.append(message["body"])
                self.something.set()
                await self.takes.wait()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": CHAT,
            "raw_path": CHAT.encode(), "root_path": "", "scheme": "http", "query_string": b"", "headers": [],
            "client": ("127.0.0.1", 1), "server": ("served", 80),
        }  # fmt: skip
        await self._app(scope, receive, send)  # type: ignore[arg-type]
