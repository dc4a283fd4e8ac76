"""Events, which everyone may emit and only inspection and the lab read; and counts, tenant by tenant."""

from choreo_agents.tracing.events import Event, FirstToken, RequestFinished, RequestSubmitted, StepRan
from choreo_agents.tracing.ledger import Ledger
from choreo_agents.tracing.sink import EventList, EventSink, discard, guarded

__all__ = [
    "Event",
    "EventList",
    "EventSink",
    "FirstToken",
    "Ledger",
    "RequestFinished",
    "RequestSubmitted",
    "StepRan",
    "discard",
    "guarded",
]
