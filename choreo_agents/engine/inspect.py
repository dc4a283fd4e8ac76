"""Lineage of messages: their ancestors, their sources, and how each was made."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.messages.message import Message, thinker
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import FinishReason

Channel = Literal["encoding", "words"]
"""Channel by which a text can reach a message: through KV that attended to it, or through text decoded from it and then
encoded again."""


@dataclass(frozen=True)
class Ancestor:
    """A message that influenced another."""

    handle: MessageHandle
    authors: frozenset[str]
    confidential: bool
    channels: frozenset[Channel]


@dataclass(frozen=True)
class MessageLineage:
    """Messages that influenced one message, nearest first."""

    handle: MessageHandle
    authors: frozenset[str]
    confidential: bool
    ancestors: tuple[Ancestor, ...]

    def through(self, channel: Channel) -> tuple[Ancestor, ...]:
        """Return the ancestors that reached it through a channel, whether or not through the other as well."""
        return tuple(ancestor for ancestor in self.ancestors if channel in ancestor.channels)

    @property
    def confidential_sources(self) -> tuple[Ancestor, ...]:
        """Ancestors that are marked confidential."""
        return tuple(ancestor for ancestor in self.ancestors if ancestor.confidential)


@dataclass(frozen=True)
class LineageReport:
    """Report of which messages influenced each of some messages."""

    messages: tuple[MessageLineage, ...]


@dataclass(frozen=True)
class Descent:
    """Direct inputs of one message. Messages are named by their ids."""

    tokens: tuple[int, ...]
    parents: tuple[str, ...]
    """Messages it attended to."""
    sources: tuple[str, ...]
    """Messages whose text was encoded again as this one: by any call on the engine."""
    authors: frozenset[str]
    """Authors in any call on the engine."""
    foreign: tuple[MessageHandle, ...] = ()
    """Messages of other models whose text was encoded as this one; their ancestors are known only to engines of those
    models."""


@dataclass(frozen=True)
class MessageRecord:
    """A message, and the call that made it."""

    handle: MessageHandle
    tokens: tuple[int, ...]
    """All tokens: also a decoded message's header and turn suffix."""
    parents: tuple[MessageHandle, ...]
    """Messages the call attended to, in order; under a method that keeps text only, whose text it read."""
    offsets: tuple[int, ...]
    """Position of each parent, ..."""
    position: int
    """... and of the message's first token: all are 0 or more."""
    sampled: tuple[int, int] | None
    """Index of the first sampled token, and the end of the sampled ones, of which there are none if the model ended at
    once; None: it was prefilled."""
    adapter: str | None
    """Name of the adapter that encoded it; None: the base model."""
    mapped: bool
    """Whether a cache mapper computed its KV from its one parent's."""
    author: str | None
    role: str | None
    foreign: tuple[MessageHandle, ...] = ()
    """Messages of other models whose text it encodes."""
    finish_reason: FinishReason | None = None
    """Finish reason of the call that decoded it last; None: it was prefilled."""


class Inspection:
    """Lineage of a tenant's messages: `engine.inspect`. Handles must be leased; their ancestors need not be.

    Every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def records(self, handles: Sequence[MessageHandle]) -> tuple[MessageRecord, ...]:
        """Return how these messages and all their ancestors were made, released ones included: parents first."""
        with self._tenant.core.lock:
            messages: dict[str, Message] = {}
            for message in [self._tenant.find(handle) for handle in handles]:
                for ancestor in message.unknown(lambda m: m.handle.id in messages):
                    messages[ancestor.handle.id] = ancestor
            return tuple(_record(self._tenant, message) for message in messages.values())

    def ancestors(self, handle: MessageHandle) -> dict[MessageHandle, str | None]:
        """Return all messages that a message's KV has ever attended to, with authors: nearest first, released ones
        included."""
        return {message.handle: message.author for message in self._tenant.find(handle).ancestors()}

    def finish_reason(self, handle: MessageHandle) -> FinishReason | None:
        """Return why a message ended: `"stop"`, by itself; `"length"`, cut at `max_tokens`; None: it was not decoded.

        Equal text at an equal place is one message: the last decode counts.
        """
        return self._tenant.find(handle).finish_reason

    def thoughts(
        self, handle: MessageHandle, author: str | None = None, *, idempotency_key: str | None = None
    ) -> tuple[MessageHandle, ...]:
        """Return the thoughts before a message: several, if several calls came to the same answer.

        Each holds thoughts and answer as decoded, in the order of the calls. Empty for answers without thinking. A
        call's thoughts end with its lease of the message.

        Args:
            handle: The message.
            author: Author of the thoughts; None: any.
            idempotency_key: Key of the call whose thoughts they are; None: of any.
        """
        thoughts = self._tenant.find(handle).thoughts
        named = (thought.message for thought in thoughts if idempotency_key is None or thought.call == idempotency_key)
        matching = (message.handle for message in named if author is None or thinker(author) in message.authors)
        return tuple(dict.fromkeys(matching))

    def audit(self, handles: Sequence[MessageHandle]) -> LineageReport:
        """Report which messages influenced these, and how: through attention, or through text encoded again.

        Authors are those of all calls on this engine: equal text at an equal place is one message. For the authors in
        one run of one graph, use `app.audit(state)`.
        """
        core = self._tenant.core
        with core.lock:
            return LineageReport(tuple(_traced(self._tenant.find(handle), core.method.keeps_kv) for handle in handles))

    def descent(self, handles: Sequence[MessageHandle], known: Container[str] = ()) -> dict[str, Descent]:
        """Return the direct inputs of these messages and of all their ancestors, by id, without those in `known`."""
        with self._tenant.core.lock:
            descents: dict[str, Descent] = {}
            queue = [self._tenant.find(handle) for handle in handles]
            for message in queue:
                name = message.handle.id
                if name in known or name in descents:
                    continue
                descents[name] = Descent(
                    message.tokens,
                    tuple(parent.handle.id for parent in message.parents),
                    tuple(source.handle.id for source in message.sources),
                    frozenset(message.authors),
                    tuple(message.foreign),
                )
                queue += [*message.parents, *message.sources]
            return descents


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


def _traced(message: Message, keeps_kv: bool) -> MessageLineage:
    """Follow a message's parents, and the sources of those that encode text again.

    Args:
        message: Message to start from.
        keeps_kv: Whether messages attend to their parents' KV; else parents' text is encoded again each time.
    """
    channels_of: dict[Message, set[Channel]] = {}
    visited: set[tuple[Message, Channel]] = set()
    queue = list(_steps(message, "encoding", keeps_kv))
    for step in queue:
        if step not in visited:
            visited.add(step)
            ancestor, channel = step
            channels_of.setdefault(ancestor, set()).add(channel)
            queue.extend(_steps(ancestor, channel, keeps_kv))
            for thought in ancestor.thoughts:
                channels_of.setdefault(thought.message, set()).add("words")
    for thought in message.thoughts:
        # It saw what the message itself has seen: it has no other ancestors.
        channels_of.setdefault(thought.message, set()).add("words")
    channels_of.pop(message, None)
    ancestors = tuple(
        Ancestor(source.handle, frozenset(source.authors), source.confidential, frozenset(channels))
        for source, channels in channels_of.items()
    )
    # Another model's KV reaches nothing here: only the author of its text is known.
    ancestors += tuple(
        Ancestor(handle, frozenset(source.authors), source.confidential, frozenset[Channel](["words"]))
        for source in (message, *channels_of)
        for handle in source.foreign
    )
    return MessageLineage(message.handle, frozenset(message.authors), message.confidential, ancestors)


def _steps(message: Message, channel: Channel, keeps_kv: bool) -> Iterator[tuple[Message, Channel]]:
    """Yield the parents and sources of a message that was reached through a channel, each with its own channel."""
    for parent in message.parents:
        yield parent, channel if keeps_kv else "words"
    for source in message.sources:
        yield source, "words"
