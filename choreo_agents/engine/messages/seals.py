"""Message authentication codes under a tenant's key, which prove that content comes back as it left the engine."""

from __future__ import annotations

import hmac
import json
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


class Seals:
    """Makes and checks codes under one tenant's key, which never leaves the engine.

    Args:
        key: The tenant's.
        salted: Whether the key comes from a salt, so that another process with the same salt has it; else it is random,
            and ends with the engine.
    """

    def __init__(self, key: bytes, *, salted: bool) -> None:
        self._key = hmac.digest(key, b"seals", "sha256")
        self.salted = salted

    def seal(self, kind: str, content: Any) -> str:
        """Return the code of JSON-plain content; a code of one `kind` is invalid for another."""
        return code(self._key, kind, content)

    def holds(self, seal: object, kind: str, content: Any) -> bool:
        """Return whether a code is of this very content. Content may be untrusted: what is not plain has none."""
        if not isinstance(seal, str) or not seal.isascii():
            return False
        try:
            return hmac.compare_digest(self.seal(kind, content), seal)
        except (TypeError, ValueError, RecursionError):
            return False

    def agree(self, other: Seals) -> bool:
        """Return whether both have the same key."""
        return hmac.compare_digest(self._key, other._key)

    def drawn(self, *names: str) -> str:
        """Return a name that nobody else can derive: the same for the same names."""
        return self.seal("drawn", [*names])


def code(key: bytes, kind: str, content: Any) -> str:
    """Return the code of JSON-plain content under a key; a code of one `kind` is invalid for another."""
    return hmac.digest(key, _encode([kind, content]).encode(), "sha256").hex()[:32]
