"""Leases that end together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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


_innermost: ContextVar[dict[int, Scope]] = ContextVar("choreo_scopes")
"""The innermost open scope by engine, in this context; replaced, never changed."""


def current(engine: int) -> Scope | None:
    """The innermost open scope of an engine (its `id`) in this context; a task may outlive the one it started in."""
    scope = _innermost.get({}).get(engine)
    while scope is not None and scope.closed:
        scope = scope.outer
    return scope


@contextmanager
def entered(engine: int) -> Iterator[Scope]:
    """Make a new scope the innermost one."""
    scope = Scope(current(engine))
    token = _innermost.set({**_innermost.get({}), engine: scope})
    try:
        yield scope
    finally:
        _innermost.reset(token)
