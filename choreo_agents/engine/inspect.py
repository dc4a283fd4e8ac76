"""How messages came about: from what, in which order, and through whom."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.messages.message import Message, thinker
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import FinishReason

Channel = Literal["encoding", "words"]
"""How a text can reach a message: through KV that attended to it, or through words decoded from it that were then
encoded again."""


@dataclass(frozen=True)
class Ancestor:
    """A message that reached another."""

    handle: MessageHandle
    authors: frozenset[str]
    confidential: bool
    channels: frozenset[Channel]


@dataclass(frozen=True)
class MessageLineage:
    """What reached one message, nearest first."""

    handle: MessageHandle
    authors: frozenset[str]
    confidential: bool
    ancestors: tuple[Ancestor, ...]

    def through(self, channel: Channel) -> tuple[Ancestor, ...]:
        """The ancestors that reached it through a channel, whether or not through the other as well."""
        return tuple(ancestor for ancestor in self.ancestors if channel in ancestor.channels)

    @property
    def confidential_sources(self) -> tuple[Ancestor, ...]:
        """The ancestors that are marked confidential."""
        return tuple(ancestor for ancestor in self.ancestors if ancestor.confidential)


@dataclass(frozen=True)
class LineageReport:
    """What really happened, message by message."""

    messages: tuple[MessageLineage, ...]


@dataclass(frozen=True)
class Descent:
    """From what one message was made. Messages are named by their ids."""

    tokens: tuple[int, ...]
    parents: tuple[str, ...]
    """What it attended to."""
    sources: tuple[str, ...]
    """The messages whose words were encoded again as this one: of all calls on the engine, whatever they were for."""
    authors: frozenset[str]
    """All who said it, of all calls on the engine."""
    foreign: tuple[MessageHandle, ...] = ()
    """The messages of other models whose words were encoded as this one: what those were made of, only the engines of
    these models can tell."""


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
    position: int
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


class Inspection:
    """What lineage says of a tenant's messages: `engine.inspect`. Handles must be leased; what they come from need not.

    Every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def records(self, handles: Sequence[MessageHandle]) -> tuple[MessageRecord, ...]:
        """How these messages and all that they descend from were made, released ones included: parents first."""
        with self._tenant.core.lock:
            found: dict[str, Message] = {}
            for message in [self._tenant.find(handle) for handle in handles]:
                for each in message.unknown(lambda other: other.handle.id in found):
                    found[each.handle.id] = each
            return tuple(_record(self._tenant, message) for message in found.values())

    def ancestors(self, handle: MessageHandle) -> dict[MessageHandle, str | None]:
        """All that a message's encoding has ever attended to, with authors: nearest first, released ones included."""
        return {message.handle: message.author for message in self._tenant.find(handle).ancestors()}

    def finish_reason(self, handle: MessageHandle) -> FinishReason | None:
        """Why a message ended: `"stop"`, by itself; `"length"`, cut at `max_tokens`; None: it was not decoded.

        Of equal words in an equal place, why those ended that were decoded last.
        """
        return self._tenant.find(handle).finish_reason

    def thoughts(
        self, handle: MessageHandle, author: str | None = None, *, idempotency_key: str | None = None
    ) -> tuple[MessageHandle, ...]:
        """What was thought before a message was said: more than once, if several calls came to the same words.

        Each holds thoughts and answer as they were decoded, in the order of the calls. Empty for what was said without
        thinking. What a call has thought goes when its lease of the message does.

        Args:
            handle: The message.
            author: Whose thoughts; None: everybody's.
            idempotency_key: Of the call whose thoughts they are; None: of any.
        """
        found = self._tenant.find(handle).thoughts
        named = (each.message for each in found if idempotency_key is None or each.call == idempotency_key)
        thought = (each.handle for each in named if author is None or thinker(author) in each.authors)
        return tuple(dict.fromkeys(thought))

    def audit(self, handles: Sequence[MessageHandle]) -> LineageReport:
        """Who influenced these messages, and how: what each attended to, and whose words it or that was made of.

        Authors are those of all calls on this engine: equal words in an equal place are one message. Who they are in
        one run of one graph, `app.audit(state)` tells.
        """
        core = self._tenant.core
        with core.lock:
            return LineageReport(tuple(_traced(self._tenant.find(handle), core.method.keeps_kv) for handle in handles))

    def descent(self, handles: Sequence[MessageHandle], known: Container[str] = ()) -> dict[str, Descent]:
        """From what these messages were made, and all that those were made of, by id; what is `known` is left out."""
        with self._tenant.core.lock:
            found: dict[str, Descent] = {}
            queue = [self._tenant.find(handle) for handle in handles]
            for message in queue:
                name = message.handle.id
                if name in known or name in found:
                    continue
                found[name] = Descent(
                    message.tokens,
                    tuple(parent.handle.id for parent in message.parents),
                    tuple(source.handle.id for source in message.sources),
                    frozenset(message.authors),
                    tuple(message.foreign),
                )
                queue += [*message.parents, *message.sources]
            return found


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
    """Follow a message's parents, and the sources of those whose words were encoded again.

    Args:
        message: Where to start.
        keeps_kv: Whether parents are attended to as they were encoded; else their text is encoded again each time.
    """
    found: dict[Message, set[Channel]] = {}
    seen: set[tuple[Message, Channel]] = set()
    queue = list(_steps(message, "encoding", keeps_kv))
    for step in queue:
        if step not in seen:
            seen.add(step)
            ancestor, channel = step
            found.setdefault(ancestor, set()).add(channel)
            queue.extend(_steps(ancestor, channel, keeps_kv))
            for thought in ancestor.thoughts:
                found.setdefault(thought.message, set()).add("words")
    for thought in message.thoughts:
        # It saw what the message itself has seen: there is nothing more above it.
        found.setdefault(thought.message, set()).add("words")
    found.pop(message, None)
    ancestors = tuple(
        Ancestor(one.handle, frozenset(one.authors), one.confidential, frozenset(channels))
        for one, channels in found.items()
    )
    # Another model's KV reaches nobody here: whose words these are is all that is known of it.
    ancestors += tuple(
        Ancestor(said, frozenset(one.authors), one.confidential, frozenset[Channel](["words"]))
        for one in (message, *found)
        for said in one.foreign
    )
    return MessageLineage(message.handle, frozenset(message.authors), message.confidential, ancestors)


def _steps(message: Message, channel: Channel, keeps_kv: bool) -> Iterator[tuple[Message, Channel]]:
    """The messages next above one that was reached through a channel."""
    for parent in message.parents:
        yield parent, channel if keeps_kv else "words"
    for source in message.sources:
        yield source, "words"
