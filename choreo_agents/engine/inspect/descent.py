"""From what messages were made, as they were made: whose they are is said elsewhere."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.handle import MessageHandle


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


def descent_of(messages: Iterable[Message], known: Container[str]) -> dict[str, Descent]:
    """Of messages, and of all that these attended to or were made of, but for those whose descent is known."""
    found: dict[str, Descent] = {}
    queue = list(messages)
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
