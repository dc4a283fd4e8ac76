"""What an engine and its server do, as Prometheus reads it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate

from langchain_core.messages import AIMessageChunk

from choreo_agents import EngineStats
from choreo_agents.chat import ChatCall

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
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(
    stats: EngineStats, requests: Mapping[int, int] | None, answers: int | None, waits: Waits | None = None
) -> str:
    """All of it as text.

    Args:
        stats: Of the engine, or of what a tenant may know of it.
        requests: That were answered, by status; None: it is not for who asks.
        answers: Under way now.
        waits: For answers so far; None: they are not for who asks, either.
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
    lines += [] if waits is None else waits.lines()
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Histogram:
    """Of durations."""

    def __init__(self) -> None:
        self._counts, self._sum_s = [0] * (len(_BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def lines(self, name: str) -> list[str]:
        """All of it as text."""
        [*below, all_of_them] = accumulate(self._counts)
        buckets = [*zip(_BOUNDS_S, below, strict=True), ("+Inf", all_of_them)]
        return [
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets),
            f"{name}_sum {self._sum_s}",
            f"{name}_count {all_of_them}",
        ]


class Waits:
    """How long answers of a server were waited for."""

    def __init__(self) -> None:
        self.first, self.next, self.queued = Histogram(), Histogram(), Histogram()

    def lines(self) -> list[str]:
        """All of it as text."""
        return [
            *self.first.lines("choreo_time_to_first_token_seconds"),
            *self.next.lines("choreo_inter_token_latency_seconds"),
            *self.queued.lines("choreo_request_queue_time_seconds"),
        ]


class TokenIntervals:
    """How long one request waits for its answers.

    Args:
        waits: Of the server.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits, self._began_s = waits, time.perf_counter()
        self._before_s: dict[int, float] = {}

    def heard(self, place: int, call: ChatCall, chunk: AIMessageChunk) -> None:
        """A piece of an answer has come: a token as a rule.

        Args:
            place: Of the answer.
            call: Which it answers.
            chunk: The piece; the last tells no token.
        """
        now_s, before_s = time.perf_counter(), self._before_s.get(place)
        is_last, self._before_s[place] = chunk.chunk_position == "last", now_s
        if before_s is None:
            self._waits.first.add(now_s - self._began_s)
        elif not is_last:
            self._waits.next.add(now_s - before_s)
        if is_last and call.queued_s is not None:
            self._waits.queued.add(call.queued_s)
