"""Events, which everyone may emit and only inspection and the lab read; and counts, tenant by tenant."""

from choreo_agents.tracing.events import (
    CallPlaced,
    EngineCame,
    EngineWent,
    Event,
    FileSkipped,
    FileUnwritten,
    FirstToken,
    KVCopied,
    RequestFinished,
    RequestSubmitted,
    StepFailed,
    StepRan,
)
from choreo_agents.tracing.ledger import Ledger
from choreo_agents.tracing.sink import EventList, EventSink, discard, guarded

__all__ = [
    "CallPlaced",
    "EngineCame",
    "EngineWent",
    "Event",
    "EventList",
    "EventSink",
    "FileSkipped",
    "FileUnwritten",
    "FirstToken",
    "KVCopied",
    "Ledger",
    "RequestFinished",
    "RequestSubmitted",
    "StepFailed",
    "StepRan",
    "discard",
    "guarded",
]
