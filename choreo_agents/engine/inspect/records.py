"""How messages were made: the calls of a run, read back from lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.tenant import Tenant
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.decoding import FinishReason


@dataclass(frozen=True)
class MessageRecord:
    """One message, and the call that made it."""

    handle: MessageHandle
    tokens: tuple[int, ...]
    """All of them: a header and what closed a decoded message included."""
    parents: tuple[MessageHandle, ...]
    """What the call attended to, in order; under a method that keeps text only, whose words it read."""
    offsets: tuple[int, ...]
    """Where each parent appeared, ..."""
    new_offset: int
    """... and where the message's first token stood: all positions of 0 or more."""
    sampled: tuple[int, int] | None
    """Index of the first token that was sampled, and the end of those that were, which are none if the model ended at
    once; None: it was prefilled."""
    adapter: str | None
    """The name of the adapter that encoded it; None: the model alone."""
    mapped: bool
    """Whether a cache mapper made its KV of its one parent's."""
    author: str | None
    role: str | None
    foreign: tuple[MessageHandle, ...] = ()
    """The messages of other models whose words it has."""
    finish_reason: FinishReason | None = None
    """Why it ended, as the call that decoded it last has it; None: it was prefilled."""


def records_of(tenant: Tenant, handles: Sequence[MessageHandle]) -> tuple[MessageRecord, ...]:
    """The records of messages and of all that they descend from, each once, parents first.

    Raises:
        HandleError: A handle is unknown, released, or another model's.
    """
    with tenant.core.lock:
        found: dict[str, Message] = {}
        todo = [tenant.find(handle) for handle in reversed(handles)]
        while todo:
            message = todo[-1]
            missing = [parent for parent in message.parents if parent.handle.id not in found]
            if missing and message.handle.id not in found:
                todo.extend(reversed(missing))
            else:
                found.setdefault(message.handle.id, message)
                todo.pop()
        return tuple(_record(tenant, message) for message in found.values())


def _record(tenant: Tenant, message: Message) -> MessageRecord:
    start = message.native_offset
    return MessageRecord(
        message.handle,
        message.tokens,
        tuple(parent.handle for parent in message.parents),
        tuple(start + offset for offset in message.relative_offsets),
        start,
        None if message.chosen is None else (message.header, message.header + len(message.chosen)),
        tenant.core.adapters.name_of(message.lineage.adapter, tenant.name),
        bool(message.lineage.mapper),
        message.author,
        message.role,
        tuple(message.foreign),
        message.finish_reason,
    )
