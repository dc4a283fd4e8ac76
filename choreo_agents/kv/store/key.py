"""Key of KV: what identifies the KV of a message."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class KVKey:
    """Everything that a message's KV depends on, the same in any process that runs the model for the tenant."""

    id: str
    """Id of the message: an HMAC over model, tokens, parents and their relative offsets."""
    model: str
    """Fingerprint of the model, with that of an adapter."""
    tokens: tuple[int, ...]
    parents: tuple[tuple[str, int], ...]
    """Ids of its parents, and their offsets relative to its first token."""
    native_offset: int
    """Position at which its first token is encoded; a file with another one is as good, since views move keys."""

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)

    def written(self) -> dict[str, str]:
        """Return the metadata of its file, without the position."""
        parents = [[parent, offset] for parent, offset in self.parents]
        tokens = json.dumps(list(self.tokens), separators=(",", ":"))
        return {"message": self.id, "model": self.model, "tokens": tokens, "parents": json.dumps(parents)}
