"""Seals: what leaves the engine and comes back is known again, unless somebody has changed it."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from itertools import islice
from typing import Any

_REMEMBERED = 1 << 15
"""Contents that were found to hold: as many as a long conversation has, which is looked at again in each call."""
_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


class Seals:
    """Of one tenant: made and checked under its key, which leaves the engine in no form.

    Args:
        key: The tenant's.
        salted: Whether the key comes of a salt, so that another process with the same salt has it, too; else it is
            random, and dies with the engine.
    """

    def __init__(self, key: bytes, *, salted: bool) -> None:
        self._key = hmac.digest(key, b"seals", "sha256")
        self.salted = salted
        self._known: dict[tuple[str, str], bytes] = {}
        """Digests of what was found to hold: a conversation is looked at again in each call."""

    @property
    def remembered(self) -> int:
        """How many contents are known to hold: never more than 32,768."""
        return len(self._known)

    def seal(self, kind: str, content: Any) -> str:
        """Of JSON-plain content; `kind` says what of, so that a seal of one kind is none of another."""
        return hmac.digest(self._key, _encode([kind, content]).encode(), "sha256").hex()[:32]

    def holds(self, seal: object, kind: str, content: Any) -> bool:
        """Whether this very content was sealed under this key. Content may be anybody's: what is not plain is not."""
        if not isinstance(seal, str) or not seal.isascii():
            return False
        try:
            made = self.seal(kind, content)
        except (TypeError, ValueError, RecursionError):
            return False
        return hmac.compare_digest(made, seal)

    def remembers(self, seal: object, kind: str, content: Any) -> bool:
        """Whether this very content is known to hold: one look at the whole, where its parts were sealed each by
        itself. What is not plain is not known."""
        known = self._known.get((kind, seal)) if isinstance(seal, str) else None
        return known is not None and known == _digest(content)

    def remember(self, seal: str, kind: str, content: Any) -> None:
        """Know content by one of its seals from now on: all that was looked at to find that it holds. Of it a digest is
        kept, however large it is."""
        if (digest := _digest(content)) is None:
            return
        if len(self._known) >= _REMEMBERED:
            for known in [*islice(self._known, _REMEMBERED // 2)]:
                self._known.pop(known, None)
        self._known[kind, seal] = digest

    def agree(self, other: Seals) -> bool:
        """Whether both are made under one key."""
        return hmac.compare_digest(self._key, other._key)

    def drawn(self, *names: str) -> str:
        """A name that nobody else can give: the same for the same names; without names, never given before."""
        return self.seal("drawn", list(names) or [secrets.token_hex(16)])


def _digest(content: Any) -> bytes | None:
    """Of plain content; None: it is not."""
    try:
        return hashlib.blake2b(_encode(content).encode(), digest_size=16).digest()
    except (TypeError, ValueError, RecursionError):
        return None
