"""What reached a message: through KV that it attended to, or through words that were encoded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.handle import MessageHandle

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


def trace(message: Message, keeps_kv: bool) -> MessageLineage:
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
