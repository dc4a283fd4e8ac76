"""Events, which everyone may emit and only inspection and the lab read; counts, tenant by tenant; and tables, as
notebooks show them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    time_s: float
    """When, in seconds of `time.perf_counter()`."""


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

    Counts are what it was charged for: every token that the engine encodes is charged to one request. What is encoded
    for its readers is charged to them.
    """

    request_id: int
    outcome: str
    tokens_encoded: int
    tokens_reused: int
    tokens_recomputed: int = 0
    tokens_outside_view: int = 0
    """Of those encoded and recomputed, in messages that its view does not hold."""
    tokens_mapped: int = 0
    tokens_of_other_models: int = 0
    """Of those encoded, in words that another model had said."""


@dataclass(frozen=True)
class StepRan(Event):
    """One forward pass: its rows (requests served), its tokens, and how many requests were unfinished at its start."""

    duration_s: float
    rows: int
    decode_rows: int
    tokens: int
    unfinished: int


@dataclass(frozen=True)
class StepFailed(Event):
    """A forward pass that failed: it, or parts of it, are run again, and only calls that fail alone are given up."""

    rows: int
    tokens: int
    error: str


@dataclass(frozen=True)
class FileSkipped(Event):
    """A file of KV that was passed over, and why: it is missing, damaged, forged, a link, no file, another user's.

    What should have been in it is computed again.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class CacheWriteFailed(Event):
    """Files of KV cannot be written to a folder, and why; told once until one can be."""

    path: str
    """The folder's."""
    reason: str


@dataclass(frozen=True)
class RequestRouted(Event):
    """A call was given to one of several engines, and how that comes to what the call reads and it lacks.

    What it has takes nothing. Bytes and tokens are what was expected when it was placed.
    """

    request_id: int
    engine: str
    bytes_copied: int
    """Of KV that is copied there from other engines."""
    tokens_again: int
    """That it encodes again, with what these come from."""
    expected_s: float
    """Until the call is done."""


@dataclass(frozen=True)
class KVCopied(Event):
    """KV has come from one engine to another, or was not taken there: then it is encoded again."""

    source: str
    engine: str
    messages: int
    refused: int
    """How many of these were not taken."""
    bytes: int
    took_s: float


@dataclass(frozen=True)
class EngineUp(Event):
    """An engine elsewhere can be sent calls: at first, or again."""

    engine: str


@dataclass(frozen=True)
class EngineDown(Event):
    """An engine elsewhere is gone, and with it the KV that it had; calls under way there are run by others."""

    engine: str
    why: str


EventSink = Callable[[Event], None]
"""Called for every event, by the engine's thread or a caller's, under the engine's lock: it must be quick, and
must not call the engine."""


def discard(event: Event) -> None:
    """The default sink."""


def guarded(sink: EventSink) -> EventSink:
    """A sink whose failures are logged, once, and go no further: watching must not stop what is watched."""
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
    """Counts of what all tenants did, for whom the engine belongs to, and of what each did itself, for that.

    Args:
        make: Makes counts that have counted nothing. Their fields are numbers.
    """

    def __init__(self, make: Callable[[], _Counts]) -> None:
        self._make = make
        self.total = make()
        """Of all."""
        self._own: defaultdict[str, _Counts] = defaultdict(make)

    def so_far(self, tenant: str | None) -> _Counts:
        """Return the counts of one tenant, or of all, to read: nothing is kept of a tenant that has left."""
        return self.total if tenant is None else self._own.get(tenant) or self._make()

    def of(self, tenant: str) -> tuple[_Counts, _Counts]:
        """Return where to count what a tenant does: for all, and its own."""
        return self.total, self._own[tenant]

    def add(self, tenant: str, count: str, amount: int = 1) -> None:
        """Add to a count of a tenant's."""
        for counts in self.of(tenant):
            setattr(counts, count, getattr(counts, count) + amount)

    def drop_tenant(self, tenant: str) -> None:
        """Forget a tenant that has left: what it did stays in the total."""
        self._own.pop(tenant, None)


def table_html(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers stand to the right, and all that is told is text.

    Args:
        title: Above it.
        columns: Their names.
        rows: A value for each column; None: there is none.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        told = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return f'<td style="text-align:right">{told}</td>'
    return f'<td style="text-align:left">{"–" if value is None else escape(str(value))}</td>'
