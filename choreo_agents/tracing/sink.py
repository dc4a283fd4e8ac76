"""Where events go."""

from __future__ import annotations

import logging
from collections.abc import Callable

from choreo_agents.tracing.events import Event

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
