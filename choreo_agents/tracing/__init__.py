"""Events: everyone may emit them, only inspection and the lab read them."""

from choreo_agents.tracing.events import Event, FirstToken, RequestFinished, RequestSubmitted, StepRan
from choreo_agents.tracing.sink import EventList, EventSink, discard, guarded

__all__ = [
    "Event",
    "EventList",
    "EventSink",
    "FirstToken",
    "RequestFinished",
    "RequestSubmitted",
    "StepRan",
    "discard",
    "guarded",
]
