"""Events, which everyone may emit and only inspection and the lab read; counts, tenant by tenant; and
tables, as notebooks show them."""

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
from choreo_agents.tracing.tables import table_html

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
    "table_html",
]
