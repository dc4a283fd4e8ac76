"""Who holds messages between calls: threads of graphs, and runs that no thread goes on with.

running     has users: nothing of it is dropped
idle        nobody has used it since: it is forgotten after a time, or when there is too much, least recently used first
forgotten   its leases are given back; what others lease, or somebody has pinned, stays
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.errors import ThreadBusyError

IDLE_S = 86_400.0
"""Seconds after which a thread of a graph that nobody uses is forgotten: its leases are given back, and who goes on
with it has its words encoded again."""
IDLE_MESSAGES = 1 << 14
"""Messages that idle threads lease at most; one that two threads lease counts twice. Beyond that, the least recently
used thread goes, whosever it is."""
IDLE_RUNS = 64
"""Runs without a checkpointer, the last ones, whose leases are kept: so that one can look at them, or go on by handing
on their state."""


@dataclass(frozen=True, eq=False)
class UnkeptRun:
    """Stands for a thread where nothing keeps the state of one: nobody goes on with what it has said."""

    is_whole: bool = True
    """Whether nothing more is said in it once nobody uses it. Else it is one call, and others may read what it said."""


Name = str | UnkeptRun


@dataclass(eq=False)
class Holding:
    """What a thread leases."""

    tenant: str
    name: Name
    scopes: dict[Scope | None, Scope] = field(default_factory=dict)
    """Its own, by that of its caller's with which it ends."""
    users: int = 0
    """Runs and calls under way; -1 while it is being forgotten."""
    used_s: float = 0.0
    """When the last of them ended."""
    messages: int = 0
    """How many it leases, while it is idle."""
    noted: dict[str, Any] = field(default_factory=dict)
    """What others remember of it, by who does: gone when it is forgotten."""


class Holdings:
    """The threads of one engine, and what they hold. Used under the engine's lock only.

    Args:
        table: Has the messages.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """In seconds."""

    def __init__(self, table: MessageTable) -> None:
        self._table = table
        self._held: dict[tuple[str, Name], Holding] = {}
        self._inside: dict[Scope, set[Holding]] = {}
        """Who has a scope that ends with this one."""
        self._runs: OrderedDict[Holding, None] = OrderedDict()
        """Idle ones, and `_threads` likewise, the least recently used first."""
        self._threads: OrderedDict[Holding, None] = OrderedDict()
        self._idle_messages = 0
        """How many messages idle ones lease."""

    def begin(self, tenant: str, name: Name) -> Holding:
        """Use a thread, until `end`.

        Raises:
            ThreadBusyError: It is being forgotten.
        """
        held = self._held.setdefault((tenant, name), Holding(tenant, name))
        if held.users < 0:
            raise ThreadBusyError(f"thread {name!r} is being forgotten: run it when that is done")
        self._wake(held)
        held.users += 1
        return held

    def end(self, held: Holding) -> None:
        """Use it no longer. Then what has been idle for too long is forgotten, and what is too much."""
        held.users -= 1
        held.used_s = self.clock()
        self._rest(held)
        self.trim()

    def scope(self, held: Holding, outer: Scope | None) -> Scope:
        """Return the scope in which a call of the thread takes its leases: they end with that of its caller.

        Not with another thread's, nor its own, where a function that makes words for an agent runs a graph.
        """
        while outer is not None and (outer.closed or outer.is_threads):
            outer = outer.outer
        if outer not in held.scopes:
            held.scopes[outer] = Scope(outer, is_threads=True)
            if outer is not None:
                self._inside.setdefault(outer, set()).add(held)
        return held.scopes[outer]

    def leave(self, tenant: str, name: Name) -> Holding:
        """Let nobody use a thread until `left`.

        Raises:
            ThreadBusyError: Somebody does, or it is being forgotten already.
        """
        held = self._held.setdefault((tenant, name), Holding(tenant, name))
        if held.users:
            raise ThreadBusyError(
                f"thread {name!r} is under way, and what it reads is not dropped: forget it when its runs have ended"
            )
        self._wake(held)
        held.users = -1
        return held

    def left(self, held: Holding, *, forgotten: bool) -> None:
        """Let it be used again: as it was, or with nothing in it."""
        held.users = 0
        if forgotten:
            self._forget(held)
        else:
            self._rest(held)

    def trim(self) -> None:
        """Forget what has been idle for too long, and then the least recently used of what is too much, runs before
        threads. What has a pinned message stays."""
        since = self.clock() - IDLE_S
        for queue, is_due in (
            (self._runs, lambda held: held.used_s <= since),
            (self._threads, lambda held: held.used_s <= since),
            (self._runs, lambda _: len(self._runs) > IDLE_RUNS or self._idle_messages > IDLE_MESSAGES),
            (self._threads, lambda _: self._idle_messages > IDLE_MESSAGES),
        ):
            while due := next((held for held in takewhile(is_due, queue) if not self._has_pins(held)), None):
                self._forget(due)

    def close_inside(self, outer: Scope) -> None:
        """End, with a scope of a caller's, what threads have leased in it."""
        for held in self._inside.pop(outer, ()):
            self._close(held.scopes.pop(outer), forgotten=False)
            if not held.users:
                self._count(held)

    def drop_tenant(self, tenant: str) -> None:
        """End all leases of a tenant's threads."""
        for held in [held for held in self._held.values() if held.tenant == tenant]:
            self._forget(held)

    def names(self, tenant: str | None) -> int:
        """Count the threads and runs, of one tenant or of all, that are used or hold something."""
        return sum(tenant in (None, held.tenant) for held in self._held.values())

    def check(self) -> None:
        """Assert that what is idle is counted."""
        idle = [*self._runs, *self._threads]
        assert all(not held.users and self._held[held.tenant, held.name] is held for held in idle)
        assert len(idle) == sum(not held.users for held in self._held.values())
        assert self._idle_messages == sum(held.messages for held in idle)
        for held in self._held.values():
            assert all(not scope.closed and scope.outer is outer for outer, scope in held.scopes.items())

    def _has_pins(self, held: Holding) -> bool:
        messages = (message for scope in held.scopes.values() for message in self._table.held_in(scope))
        return any(message.entry is not None and message.entry.pins for message in messages)

    def _queue(self, held: Holding) -> OrderedDict[Holding, None]:
        return self._runs if isinstance(held.name, UnkeptRun) and held.name.is_whole else self._threads

    def _count(self, held: Holding) -> None:
        """See how much an idle one leases; there is nothing to know of one that leases nothing."""
        before, held.messages = held.messages, sum(len(self._table.held_in(scope)) for scope in held.scopes.values())
        self._idle_messages += held.messages - before
        if not held.messages:
            self._forget(held)

    def _rest(self, held: Holding) -> None:
        """Have it idle, if nobody uses it."""
        if not held.users and self._held.get((held.tenant, held.name)) is held:
            self._queue(held)[held] = None
            self._count(held)

    def _wake(self, held: Holding) -> None:
        """Have it idle no longer."""
        self._queue(held).pop(held, None)
        self._idle_messages -= held.messages
        held.messages = 0

    def _forget(self, held: Holding) -> None:
        self._wake(held)
        if self._held.get((held.tenant, held.name)) is held:
            del self._held[held.tenant, held.name]
        scopes, held.scopes = held.scopes, {}
        for outer, scope in scopes.items():
            if outer is not None:
                self._inside[outer].discard(held)
            self._close(scope, forgotten=True)

    def _close(self, scope: Scope, *, forgotten: bool) -> None:
        scope.closed = True
        self._table.close(scope, forgotten=forgotten)
