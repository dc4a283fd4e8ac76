"""Seals: what leaves the engine and comes back is known again, unless somebody has changed it."""

from __future__ import annotations

import hmac
import json
import secrets
from copy import deepcopy
from typing import Any

_REMEMBERED = 8192
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
        self._held: dict[str, tuple[str, Any]] = {}
        """What was found to hold: a conversation is checked again in each call, and comparing is cheaper."""

    def seal(self, kind: str, content: Any) -> str:
        """Of JSON-plain content; `kind` says what of, so that a seal of one kind is none of another."""
        return hmac.digest(self._key, _encode([kind, content]).encode(), "sha256").hex()[:32]

    def holds(self, seal: object, kind: str, content: Any, *, once: bool = False) -> bool:
        """Whether this very content was sealed under this key. Content may be anybody's: what is not plain is not.

        What is looked at `once` is not remembered.
        """
        if not isinstance(seal, str) or not seal.isascii():
            return False
        try:
            if not once and self._held.get(seal) == (kind, content):
                return True
            made = self.seal(kind, content)
        except (TypeError, ValueError, RecursionError):
            return False
        holds = hmac.compare_digest(made, seal)
        if holds and not once:
            if len(self._held) >= _REMEMBERED:
                self._held.clear()
            self._held[seal] = (kind, deepcopy(content))
        return holds

    def agree(self, other: Seals) -> bool:
        """Whether both are made under one key."""
        return hmac.compare_digest(self._key, other._key)

    def drawn(self, *names: str) -> str:
        """A name that nobody else can give: the same for the same names; without names, never given before."""
        return self.seal("drawn", list(names) or [secrets.token_hex(16)])
