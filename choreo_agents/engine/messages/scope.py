"""Leases that end together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Scope:
    """A `with engine.scope():` block. Each message counts the leases that were taken in it.

    Threads and tasks started inside inherit it where they copy the context, as asyncio and LangGraph do.
    """

    outer: Scope | None
    closed: bool = False
    is_threads: bool = False
    """Whether it is a thread's (see `Holdings`), which has a lease of its own of all that it reads."""

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


_innermost: ContextVar[dict[object, Scope]] = ContextVar("choreo_scopes")
"""The innermost open scope by whose it is, in this context; replaced, never changed."""


def current(whose: object) -> Scope | None:
    """The innermost open scope of a tenant in this context; a task may outlive the one it started in."""
    scope = _innermost.get({}).get(whose)
    return None if scope is None else next((open_ for open_ in scope.chain() if not open_.closed), None)


@contextmanager
def entered(whose: object) -> Iterator[Scope]:
    """Make a new scope the innermost one."""
    with inside(whose, Scope(current(whose))) as scope:
        yield scope


@contextmanager
def inside(whose: object, scope: Scope) -> Iterator[Scope]:
    """Make a scope the innermost one."""
    token = _innermost.set({**_innermost.get({}), whose: scope})
    try:
        yield scope
    finally:
        # Left in another context, as fixtures that are generators may be: the block's own has ended with it.
        with suppress(ValueError):
            _innermost.reset(token)
