"""Engine events and their sinks, per-tenant counters, and HTML tables for notebooks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    time_s: float
    """When it happened, in seconds of `time.perf_counter()`."""


@dataclass(frozen=True)
class RequestSubmitted(Event):
    """A prefill or decode that will run (one answered from the cache emits nothing)."""

    request_id: int
    kind: str
    author: str | None
    role: str | None


@dataclass(frozen=True)
class FirstToken(Event):
    """The first sampled token of a decode; `waited_s` counts from its submission."""

    request_id: int
    waited_s: float


@dataclass(frozen=True)
class RequestFinished(Event):
    """A request that ended; `outcome` is `done`, `cancelled`, `timed out` or `failed`.

    Counts are the tokens charged to it: every encoded token is charged to one request. What is encoded on behalf of its
    readers is charged to them.
    """

    request_id: int
    outcome: str
    tokens_encoded: int
    tokens_reused: int
    tokens_recomputed: int = 0
    tokens_outside_view: int = 0
    """Of the tokens encoded and recomputed, those in messages outside its view."""
    tokens_mapped: int = 0
    tokens_of_other_models: int = 0
    """Of the tokens encoded, those in text that another model generated."""


@dataclass(frozen=True)
class StepRan(Event):
    """A forward pass that ran: its rows (requests served), tokens, and requests unfinished when it began."""

    duration_s: float
    rows: int
    decode_rows: int
    tokens: int
    unfinished: int


@dataclass(frozen=True)
class StepFailed(Event):
    """A forward pass that failed; it is retried, whole or in parts, and only requests that fail alone are given up."""

    rows: int
    tokens: int
    error: str


@dataclass(frozen=True)
class FileSkipped(Event):
    """A file of KV that was skipped because it is missing, damaged, forged, a link, not a file, or another user's.

    Its KV is computed again.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class CacheWriteFailed(Event):
    """A folder that files of KV cannot be written to; emitted once until a write succeeds again."""

    path: str
    """Path of the folder."""
    reason: str


@dataclass(frozen=True)
class RequestRouted(Event):
    """A call that was routed to one of several engines, with the cost estimated then.

    KV that the engine already has costs nothing.
    """

    request_id: int
    engine: str
    bytes_copied: int
    """Bytes of KV copied to it from other engines."""
    tokens_again: int
    """Tokens that it encodes again, their ancestors included."""
    expected_s: float
    """Seconds until the call is done."""


@dataclass(frozen=True)
class KVCopied(Event):
    """KV that was copied between engines; what the target refused is encoded again there."""

    source: str
    engine: str
    messages: int
    refused: int
    """Number of those messages that the target did not accept."""
    bytes: int
    took_s: float


@dataclass(frozen=True)
class EngineUp(Event):
    """A remote engine that became available, at first or again."""

    engine: str


@dataclass(frozen=True)
class EngineDown(Event):
    """A remote engine that was lost with its KV; its running calls are taken over by others."""

    engine: str
    why: str


EventSink = Callable[[Event], None]
"""Callback for every event, on the engine's or a caller's thread and under the engine's lock: it must be quick, and
must not call the engine."""


def discard(event: Event) -> None:
    """Ignore an event: the default sink."""


def guarded(sink: EventSink) -> EventSink:
    """Wrap a sink so that its errors are logged once and never propagate: tracing must not stop the engine."""
    failed = False

    def emit(event: Event) -> None:
        nonlocal failed
        try:
            sink(event)
        except Exception:
            if not failed:
                logging.getLogger(__name__).exception(
                    "an event sink failed on %r; further failures are not logged", event
                )
            failed = True

    return emit


class EventList:
    """A sink that keeps every event in `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


_Counts = TypeVar("_Counts")


class PerTenantCounters(Generic[_Counts]):
    """Counters per tenant, and their total over all tenants for the engine's admin.

    Args:
        make: Returns counters at zero. Their fields are numbers.
    """

    def __init__(self, make: Callable[[], _Counts]) -> None:
        self._make = make
        self.total = make()
        """Counters summed over all tenants."""
        self._own: defaultdict[str, _Counts] = defaultdict(make)

    def so_far(self, tenant: str | None) -> _Counts:
        """Return the counters of one tenant, or the total, to read: no entry is created for a tenant that has left."""
        return self.total if tenant is None else self._own.get(tenant) or self._make()

    def of(self, tenant: str) -> tuple[_Counts, _Counts]:
        """Return the counters that a tenant's work goes into: the total, and its own."""
        return self.total, self._own[tenant]

    def add(self, tenant: str, count: str, amount: int = 1) -> None:
        """Add to one counter of a tenant and of the total."""
        for counts in self.of(tenant):
            setattr(counts, count, getattr(counts, count) + amount)

    def drop_tenant(self, tenant: str) -> None:
        """Forget a tenant that has left; the total keeps its counts."""
        self._own.pop(tenant, None)


def table_html(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML, escaped; numbers are aligned right.

    Args:
        title: Caption.
        columns: Column names.
        rows: A value for each column; None is shown as a dash.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return f'<td style="text-align:right">{number}</td>'
    return f'<td style="text-align:left">{"–" if value is None else escape(str(value))}</td>'
