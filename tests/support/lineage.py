"""How messages were made, as `engine.inspect` tells it."""

from __future__ import annotations

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import MessageRecord
from choreo_agents.kv.handle import MessageHandle


def record_of(engine: Engine, handle: MessageHandle) -> MessageRecord:
    """How a message was made."""
    return engine.inspect.records([handle])[-1]


def parents_of(engine: Engine, handle: MessageHandle, seen_by: MessageHandle | None = None) -> list[MessageRecord]:
    """How what a message has attended to was made, in the order of its view.

    Args:
        engine: Has it.
        handle: The message.
        seen_by: A leased message that descends from it, if it has been released itself.
    """
    known = {record.handle: record for record in engine.inspect.records([seen_by or handle])}
    return [known[parent] for parent in known[handle].parents]
