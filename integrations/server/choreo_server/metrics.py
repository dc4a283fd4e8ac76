"""Metrics of an engine and its server in Prometheus' text format."""

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
"""Fields of `EngineStats` that are gauges; all others are counters."""
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(
    stats: EngineStats, requests: Mapping[int, int] | None, answers: int | None, waits: Waits | None = None
) -> str:
    """Return metrics in Prometheus' text format.

    Args:
        stats: Statistics of the engine, or a tenant's share of them.
        requests: Requests by status; None if the caller may not see them.
        answers: Answers in progress.
        waits: Latency histograms; None if the caller may not see them.
    """
    lines: list[str] = []
    values = asdict(stats)
    words = {name: values.pop(name) for name, value in [*values.items()] if isinstance(value, str)}
    info = ",".join(f'{name}="{_escape(value)}"' for name, value in words.items())
    lines += ["# TYPE choreo_engine_info gauge", f"choreo_engine_info{{{info}}} 1"]
    for name, value in values.items():
        kind = "gauge" if name in _NOW else "counter"
        metric = f"choreo_{name}" if kind == "gauge" else f"choreo_{name}_total"
        lines += [f"# TYPE {metric} {kind}", f"{metric} {value}"]
    if requests is not None:
        lines.append("# TYPE choreo_http_requests_total counter")
        lines += [f'choreo_http_requests_total{{status="{status}"}} {requests[status]}' for status in sorted(requests)]
        lines += ["# TYPE choreo_answers_under_way gauge", f"choreo_answers_under_way {answers}"]
    lines += [] if waits is None else waits.lines()
    return "\n".join([*lines, ""])


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Histogram:
    """A histogram of durations."""

    def __init__(self) -> None:
        self._counts, self._sum_s = [0] * (len(_BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def lines(self, name: str) -> list[str]:
        """Return the histogram's lines in Prometheus' text format."""
        [*below, all_of_them] = accumulate(self._counts)
        buckets = [*zip(_BOUNDS_S, below, strict=True), ("+Inf", all_of_them)]
        return [
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets),
            f"{name}_sum {self._sum_s}",
            f"{name}_count {all_of_them}",
        ]


class Waits:
    """Latency histograms of a server: time to first token, between tokens, and in the queue."""

    def __init__(self) -> None:
        self.first, self.next, self.queued = Histogram(), Histogram(), Histogram()

    def lines(self) -> list[str]:
        """Return all histograms in Prometheus' text format."""
        return [
            *self.first.lines("choreo_time_to_first_token_seconds"),
            *self.next.lines("choreo_inter_token_latency_seconds"),
            *self.queued.lines("choreo_request_queue_time_seconds"),
        ]


class TokenIntervals:
    """Measures the latencies of one request.

    Args:
        waits: Histograms of the server.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits, self._began_s = waits, time.perf_counter()
        self._before_s: dict[int, float] = {}

    def observe(self, place: int, call: ChatCall, chunk: AIMessageChunk) -> None:
        """Measure the arrival of a chunk, which is a token as a rule.

        Args:
            place: Index of the answer.
            call: Call of the answer.
            chunk: The chunk; the last one has no token.
        """
        now_s, before_s = time.perf_counter(), self._before_s.get(place)
        is_last, self._before_s[place] = chunk.chunk_position == "last", now_s
        if before_s is None:
            self._waits.first.add(now_s - self._began_s)
        elif not is_last:
            self._waits.next.add(now_s - before_s)
        if is_last and call.queued_s is not None:
            self._waits.queued.add(call.queued_s)
