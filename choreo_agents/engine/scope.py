"""Leases that end together."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class Scope:
    """Counts the leases taken inside a `with engine.scope():` block, by message id.

    Threads and tasks started inside inherit it where they copy the context, as asyncio and LangGraph do.
    """

    outer: Scope | None
    leases: Counter[str] = field(default_factory=Counter)
    closed: bool = False

    def forget(self, message_id: str) -> None:
        """A lease was dropped by hand: take it off the innermost open scope that counts it."""
        scope: Scope | None = self
        while scope is not None:
            if scope.leases[message_id] > 0:
                scope.leases[message_id] -= 1
                return
            scope = scope.outer


current_scopes: ContextVar[dict[int, Scope] | None] = ContextVar("choreo_scopes", default=None)
"""The innermost scope of each engine, by `id(engine)`, in this context."""
