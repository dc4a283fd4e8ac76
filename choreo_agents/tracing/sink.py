"""Where events go."""

from __future__ import annotations

from collections.abc import Callable

from choreo_agents.tracing.events import Event

EventSink = Callable[[Event], None]
"""Called on the engine's thread for every event: it must be quick and must not raise."""


def discard(event: Event) -> None:
    """The default sink."""


class EventList:
    """A sink that keeps every event in `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
