"""Events: everyone may emit them, only inspection and the lab read them."""

from choreo_agents.tracing.events import (
    Event,
    FileSkipped,
    FirstToken,
    RequestFinished,
    RequestSubmitted,
    StepFailed,
    StepRan,
)
from choreo_agents.tracing.sink import EventList, EventSink, discard, guarded

__all__ = [
    "Event",
    "EventList",
    "EventSink",
    "FileSkipped",
    "FirstToken",
    "RequestFinished",
    "RequestSubmitted",
    "StepFailed",
    "StepRan",
    "discard",
    "guarded",
]
