"""Who holds messages between calls: threads of graphs, and runs that no thread goes on with.

running     has users: nothing of it is dropped
idle        nobody has used it since: it is forgotten after a time, or when there is too much, least recently used first
forgotten   its leases are given back; what others lease, or somebody has pinned, stays
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.errors import ThreadBusyError

IDLE_S = 86_400.0
"""Seconds after which a thread of a graph that nobody uses is forgotten: its leases are given back, and who goes on
with it has its words encoded again."""
IDLE_MESSAGES = 1 << 14
"""Messages that idle threads lease at most; one that two threads lease counts twice. Beyond that, the tenant with the
most loses its least recently used thread."""
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
    """Runs and calls under way."""
    used_s: float = 0.0
    """When the last of them ended."""
    messages: int = 0
    """How many it leases, while it is idle."""
    noted: dict[str, Any] = field(default_factory=dict)
    """What others remember of it, by who does: gone when it is forgotten."""


class Holdings:
    """Of one engine. Used under the engine's lock only.

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
        self._idle: Counter[str] = Counter()
        """How many messages idle ones lease, by tenant."""
        self._leaving: set[tuple[str, Name]] = set()

    def begin(self, tenant: str, name: Name) -> Holding:
        """Somebody uses a thread, until `end`.

        Raises:
            ThreadBusyError: It is being forgotten.
        """
        if (tenant, name) in self._leaving:
            raise ThreadBusyError(f"thread {name!r} is being forgotten: run it when that is done")
        held = self._held.setdefault((tenant, name), Holding(tenant, name))
        self._wake(held)
        held.users += 1
        return held

    def end(self, held: Holding) -> None:
        """Somebody uses it no longer. Then what has been idle for too long is forgotten, and what is too much."""
        held.users -= 1
        if not held.users and self._held.get((held.tenant, held.name)) is held:
            held.used_s = self.clock()
            self._rest(held)
        self.trim()

    def scope(self, held: Holding, outer: Scope | None) -> Scope:
        """In which a call of the thread takes its leases: they end with the scope that its caller has opened.

        Not with another thread's, nor its own, where a function that makes words for an agent runs a graph.
        """
        while outer is not None and (outer.closed or outer.is_threads):
            outer = outer.outer
        if outer not in held.scopes:
            held.scopes[outer] = Scope(outer, is_threads=True)
            if outer is not None:
                self._inside.setdefault(outer, set()).add(held)
        return held.scopes[outer]

    def hold(self, messages: Iterable[Message], scope: Scope) -> None:
        """Have a thread lease what it names, whoever else does."""
        for message in messages if not scope.closed else ():
            if not message.scoped[scope]:
                self._table.lease(message, scope)

    def leave(self, tenant: str, name: Name) -> None:
        """Let nobody use a thread until `left`.

        Raises:
            ThreadBusyError: Somebody does, or it is being forgotten already.
        """
        held = self._held.get((tenant, name))
        if (held is not None and held.users) or (tenant, name) in self._leaving:
            raise ThreadBusyError(
                f"thread {name!r} is under way, and what it reads is not dropped: forget it when its runs have ended"
            )
        self._leaving.add((tenant, name))

    def left(self, tenant: str, name: Name, *, forgotten: bool) -> None:
        """It may be used again: as it was, or with nothing in it."""
        self._leaving.discard((tenant, name))
        held = self._held.get((tenant, name))
        if forgotten and held is not None:
            self._forget(held)

    def trim(self) -> None:
        """Forget what has been idle for too long, and then the least recently used of what is too much: runs before
        threads, and of those the threads of the tenant whose are the most. What has a pinned message stays."""
        since = self.clock() - IDLE_S
        for queue in (self._runs, self._threads):
            self._forget_first(queue, lambda held: held.used_s <= since)
        self._forget_first(self._runs, lambda _: len(self._runs) > IDLE_RUNS)
        self._forget_first(self._runs, lambda _: self._idle.total() > IDLE_MESSAGES)
        while self._idle.total() > IDLE_MESSAGES:
            [(tenant, _)] = self._idle.most_common(1)
            first = self._first(self._threads, lambda _: True, of=tenant)
            if first is None:
                return  # all of them have something pinned
            self._forget(first)

    def close_inside(self, outer: Scope) -> None:
        """A scope of a caller's has ended: with it what threads have leased in it."""
        for held in self._inside.pop(outer, ()):
            self._close(held.scopes.pop(outer), forgotten=False)
            if not held.users:
                self._count(held)

    def drop_tenant(self, tenant: str) -> None:
        """A tenancy has ended, and all its leases."""
        for held in [held for held in self._held.values() if held.tenant == tenant]:
            self._forget(held)

    def names(self, tenant: str | None) -> int:
        """How many threads and runs of a tenant's, or of all, are used or hold something."""
        return sum(tenant in (None, held.tenant) for held in self._held.values())

    def check(self) -> None:
        """Assert that what is idle is counted."""
        idle = [*self._runs, *self._threads]
        assert all(not held.users and self._held[held.tenant, held.name] is held for held in idle)
        assert len(idle) == sum(not held.users for held in self._held.values())
        assert self._idle.total() == sum(held.messages for held in idle)
        for held in self._held.values():
            assert all(not scope.closed and scope.outer is outer for outer, scope in held.scopes.items())

    def _forget_first(self, queue: OrderedDict[Holding, None], is_due: Callable[[Holding], bool]) -> None:
        """Forget the first of a queue for as long as it is due."""
        while (held := self._first(queue, is_due)) is not None:
            self._forget(held)

    def _first(
        self, queue: OrderedDict[Holding, None], is_due: Callable[[Holding], bool], of: str | None = None
    ) -> Holding | None:
        """The first of a queue, or of a tenant's in it, without anything pinned; None if one before it is not due."""
        for held in queue:
            if not is_due(held):
                return None
            if of in (None, held.tenant) and not self._has_pins(held):
                return held
        return None

    def _has_pins(self, held: Holding) -> bool:
        messages = (message for scope in held.scopes.values() for message in self._table.held_in(scope))
        return any(message.entry is not None and message.entry.pins for message in messages)

    def _queue(self, held: Holding) -> OrderedDict[Holding, None]:
        return self._runs if isinstance(held.name, UnkeptRun) and held.name.is_whole else self._threads

    def _rest(self, held: Holding) -> None:
        """It is idle from now on."""
        self._queue(held)[held] = None
        self._count(held)

    def _count(self, held: Holding) -> None:
        """See how much an idle one leases; there is nothing to know of one that leases nothing."""
        before, held.messages = held.messages, sum(len(self._table.held_in(scope)) for scope in held.scopes.values())
        self._idle[held.tenant] += held.messages - before
        if not held.messages:
            self._forget(held)

    def _wake(self, held: Holding) -> None:
        if self._queue(held).pop(held, self) is None:
            self._idle[held.tenant] -= held.messages
            held.messages = 0
            if not self._idle[held.tenant]:
                del self._idle[held.tenant]

    def _forget(self, held: Holding) -> None:
        self._wake(held)
        del self._held[held.tenant, held.name]
        scopes, held.scopes = held.scopes, {}
        for outer, scope in scopes.items():
            if outer is not None:
                self._inside[outer].discard(held)
            self._close(scope, forgotten=True)

    def _close(self, scope: Scope, *, forgotten: bool) -> None:
        scope.closed = True
        self._table.close(scope, forgotten=forgotten)
