"""The messages that a recording names: each is written down once, behind what it was encoded from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.recording.digests import Digests
from choreo_agents.engine.recording.format import Origin, RecordedMessage


class NotedMessages:
    """Of one recording. May be used from any thread.

    Args:
        write: Adds a line to it.
    """

    def __init__(self, write: Callable[[RecordedMessage], None]) -> None:
        self._write = write
        self._noted: set[str] = set()
        self._lock = threading.Lock()

    def names(self, digests: Digests, messages: Iterable[Message]) -> tuple[str, ...]:
        """What messages are called, which have their lines when this returns.

        Args:
            digests: Under the recording's key, of the engine that has the messages.
            messages: Which.
        """

        name = digests.name
        with self._lock:
            found: list[str] = []
            for message in messages:
                waiting = [message]
                while waiting:  # no recursion: a conversation may be long
                    each = waiting[-1]
                    above = next((parent for parent in each.parents if name(parent) not in self._noted), None)
                    if name(each) in self._noted or above is None:
                        self._note(each, name)
                        waiting.pop()
                    else:
                        waiting.append(above)
                found.append(name(message))
        return tuple(found)

    def _note(self, message: Message, name: Callable[[Message], str]) -> None:
        if (own := name(message)) not in self._noted:
            self._noted.add(own)
            self._write(
                RecordedMessage(
                    name=own,
                    tokens=len(message.tokens),
                    parents=tuple(map(name, message.parents)),
                    role=message.role,
                    author=message.author,
                    origin=_origin(message),
                    at=message.native_offset,
                    offsets=message.relative_offsets,
                    words_of=tuple(map(name, message.sources)),
                    confidential=message.confidential,
                )
            )


def _origin(message: Message) -> Origin:
    if message.lineage.mapper:
        return "mapped"
    if message.is_thought:
        return "thought"
    return "given" if message.chosen is None else "said"
