"""What an engine and its server do, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from choreo_agents import EngineStats

_NOW = frozenset(
    (
        "unfinished",
        "messages",
        "leases",
        "kv_bytes",
        "kv_budget_bytes",
        "graphs",
        "host_bytes",
        "disk_bytes",
        "threads",
    )
)
"""What may fall; all else of an engine's are totals."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(stats: EngineStats, requests: Mapping[int, int] | None, answers: int | None) -> str:
    """All of it as text.

    Args:
        stats: Of the engine, or of what a tenant may know of it.
        requests: That were answered, by status; None: it is not for who asks.
        answers: Under way now.
    """
    lines: list[str] = []
    told = asdict(stats)
    words = {name: told.pop(name) for name, value in [*told.items()] if isinstance(value, str)}
    info = ",".join(f'{name}="{_escaped(value)}"' for name, value in words.items())
    lines += ["# TYPE choreo_engine_info gauge", f"choreo_engine_info{{{info}}} 1"]
    for name, value in told.items():
        kind = "gauge" if name in _NOW else "counter"
        metric = f"choreo_{name}" if kind == "gauge" else f"choreo_{name}_total"
        lines += [f"# TYPE {metric} {kind}", f"{metric} {value}"]
    if requests is not None:
        lines.append("# TYPE choreo_http_requests_total counter")
        lines += [f'choreo_http_requests_total{{status="{status}"}} {requests[status]}' for status in sorted(requests)]
        lines += ["# TYPE choreo_answers_under_way gauge", f"choreo_answers_under_way {answers}"]
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class CountedStatuses:
    """An ASGI application whose answers are counted by their status.

    Args:
        app: The application.
        requests: Where they are counted.
    """

    def __init__(self, app: ASGIApp, requests: Counter[int]) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
