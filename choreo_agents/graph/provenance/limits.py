"""How much of a conversation a graph's state may hold."""

from __future__ import annotations

from typing import Any

from choreo_agents.errors import InvalidRequestError

MOST_MESSAGES = 100_000
"""That come as input, or that an agent reads: each call goes over all of them."""


def require_few(name: str, listed: Any) -> None:
    """Raise `InvalidRequestError` if what a channel holds, or is given, is more than `MOST_MESSAGES`."""
    if isinstance(listed, list | tuple) and len(listed) > MOST_MESSAGES:
        raise InvalidRequestError(
            f"{name!r} of the state would hold {len(listed):,} messages, at most {MOST_MESSAGES:,}: remove those that "
            "nobody is to see any more (RemoveMessage), or begin another thread with a summary"
        )
