"""Message authentication codes under a tenant's key, which prove that content comes back as it left the engine."""

from __future__ import annotations

import hashlib
import hmac
import json
import marshal
from itertools import islice
from typing import Any

_REMEMBERED = 1 << 15
"""Verified contents to remember: as many as a long thread has, which is checked again in each call."""
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
        self._known: dict[str, bytes] = {}
        """Digests of verified contents, by their codes."""

    def seal(self, kind: str, content: Any) -> str:
        """Return the code of JSON-plain content; a code of one `kind` is invalid for another."""
        return code(self._key, kind, content)

    def holds(self, seal: object, kind: str, content: Any) -> bool:
        """Return whether a code is of this very content. Content may be untrusted: what is not plain has none."""
        if not isinstance(seal, str) or not seal.isascii():
            return False
        digest = _digest((kind, content))
        if digest is not None and self._known.get(seal) == digest:
            return True
        try:
            expected = self.seal(kind, content)
        except (TypeError, ValueError, RecursionError):
            return False
        if not hmac.compare_digest(expected, seal):
            return False
        if len(self._known) >= _REMEMBERED:
            for old in [*islice(self._known, _REMEMBERED // 2)]:
                self._known.pop(old, None)
        if digest is not None:
            self._known[seal] = digest
        return True

    def agree(self, other: Seals) -> bool:
        """Return whether both have the same key."""
        return hmac.compare_digest(self._key, other._key)

    def drawn(self, *names: str) -> str:
        """Return a name that nobody else can derive: the same for the same names."""
        return self.seal("drawn", [*names])


def code(key: bytes, kind: str, content: Any) -> str:
    """Return the code of JSON-plain content under a key; a code of one `kind` is invalid for another."""
    return hmac.digest(key, _encode([kind, content]).encode(), "sha256").hex()[:32]


def _digest(content: Any) -> bytes | None:
    """Return a digest of plain content, in a third of a code's time; None if it has other types."""
    try:
        # Like JSON, version 0 distinguishes types and ignores whether parts are the same objects.
        return hashlib.sha256(marshal.dumps(content, 0)).digest()
    except ValueError:
        return None
