"""Digests of what was asked and said. Nobody who lacks their key can find out by guessing what they are of."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.kv.handle import MessageHandle, message_id

_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode
_SHORT = 16
"""Characters of a digest that names a message, or a part of a request."""


class Digests:
    """Under the key of one recording: the same for the same things in every run of a program that has the key.

    Args:
        key: The recording's.
        find: The message of a handle.
    """

    def __init__(self, key: bytes, find: Callable[[MessageHandle], Message]) -> None:
        self.key = key
        self._find = find
        self._messages: WeakKeyDictionary[Message, str] = WeakKeyDictionary()

    def of(self, what: str, content: Any) -> str:
        """Of JSON-plain content; `what` says what it is."""
        return hmac.digest(self.key, _encode([what, content]).encode(), "sha256").hex()[:32]

    def request(
        self, handles: Sequence[MessageHandle], offsets: Sequence[int], end: int, asked: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return a digest of each part of a call: of its view, by what that was made of and where, and of what else it
        depends on."""
        seen = [self.message(self._find(handle)) for handle in handles]
        parts = {"view": [seen, [offset - end for offset in offsets]], **asked}
        return {name: self.of(name, part)[:_SHORT] for name, part in parts.items()}

    def name(self, message: Message) -> str:
        """Return the name by which a record knows a message."""
        return self.message(message)[:_SHORT]

    def message(self, message: Message) -> str:
        """Of a message's words, and of all that its encoding has attended to."""
        waiting = [message]
        while waiting:  # no recursion: a conversation may be long
            each = waiting[-1]
            above = next((parent for parent in each.parents if parent not in self._messages), None)
            if each in self._messages or above is None:
                waiting.pop()
                if each not in self._messages:
                    self._messages[each] = self.lineage(each.lineage)
            else:
                waiting.append(above)
        return self._messages[message]

    def lineage(self, lineage: Lineage) -> str:
        """The same of a message that is not there yet."""
        parents = [self.message(parent) for parent in lineage.parents]
        placement, encoder = lineage.placement, f"{lineage.adapter}~{lineage.mapper}"
        return message_id(self.key, encoder, lineage.tokens, parents, placement.relative())
