"""What names the KV of a message in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass

from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class KVKey:
    """All that a message's KV depends on: names it in any process that runs the same model for the same tenant."""

    id: str
    """The message's: an HMAC over model, tokens, parents and their relative places."""
    model: str
    """Fingerprint of the model, with that of its adapter."""
    tokens: tuple[int, ...]
    parents: tuple[tuple[str, int], ...]
    """Ids and places relative to the message's first token."""
    native_offset: int
    """The position that its first token is encoded at; a file of any is good, since views move it."""

    @property
    def handle(self) -> MessageHandle:
        """Of the message, wherever it is held."""
        return MessageHandle(id=self.id, model=self.model, length=len(self.tokens))

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.tokens)

    def written(self) -> dict[str, str]:
        """What a file says of it, but for the position."""
        parents = [[parent, offset] for parent, offset in self.parents]
        tokens = json.dumps(list(self.tokens), separators=(",", ":"))
        return {"message": self.id, "model": self.model, "tokens": tokens, "parents": json.dumps(parents)}


@dataclass(frozen=True)
class TierKey:
    """Names the KV of a message that its engine knows: the id says what else it depends on."""

    id: str
    length: int
    native_offset: int

    def written(self) -> dict[str, str]:
        return {"message": self.id}


FileKey = KVKey | TierKey
"""What a file is written under, and asked for by: the message's id names it."""
