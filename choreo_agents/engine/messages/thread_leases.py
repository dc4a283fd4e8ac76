"""Who holds messages between calls: threads of graphs, and runs that no thread goes on with.

running     has users: nothing of it is dropped
idle        nobody has used it since: it is forgotten after a time, or when there is too much, least recently used first
forgotten   its leases are given back; what others lease, or somebody has pinned, stays
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from choreo_agents.engine.messages.message import Scope
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.errors import ThreadBusyError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.lock import EngineLock

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
class EphemeralRun:
    """Stands for a thread where nothing keeps the state of one: nobody goes on with what it has said."""

    is_whole: bool = True
    """Whether nothing more is said in it once nobody uses it. Else it is one call, and others may read what it said."""


Name = str | EphemeralRun


@dataclass(eq=False)
class ThreadLease:
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


class ThreadLeases:
    """The threads of one engine, and what they hold. Used under the engine's lock only.

    Args:
        table: Has the messages.
        lock: The engine's.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """In seconds."""

    def __init__(self, table: MessageTable, lock: EngineLock) -> None:
        self.table, self.lock = table, lock
        self._held: defaultdict[str, dict[Name, ThreadLease]] = defaultdict(dict)
        """What each thread holds, by tenant and by the thread's name."""
        self._inside: defaultdict[Scope | None, set[ThreadLease]] = defaultdict(set)
        """Who has a scope that ends with this one, or with none."""
        self._runs: OrderedDict[ThreadLease, None] = OrderedDict()
        """Idle ones, and `_threads` likewise, the least recently used first."""
        self._threads: OrderedDict[ThreadLease, None] = OrderedDict()
        self._idle_messages = 0
        """How many messages idle ones lease."""

    def woken(self, tenant: str, name: Name) -> ThreadLease:
        """Return what a thread holds, idle no longer."""
        held = self._held[tenant].setdefault(name, ThreadLease(tenant, name))
        self._wake(held)
        return held

    def rest(self, held: ThreadLease) -> None:
        """Have it idle, if nobody uses it. Then what has been idle for too long is forgotten, and what is too much."""
        if not held.users and self._is_held(held):
            self._queue(held)[held] = None
            self._count(held)
        self.trim()

    def scope(self, held: ThreadLease, outer: Scope | None) -> Scope:
        """Return the scope in which a call of the thread takes its leases: they end with that of its caller.

        Not with another thread's, nor its own, where a function that makes words for an agent runs a graph.
        """
        while outer is not None and (outer.closed or outer.is_threads):
            outer = outer.outer
        if outer not in held.scopes:
            held.scopes[outer] = Scope(outer, is_threads=True)
            self._inside[outer].add(held)
        return held.scopes[outer]

    def trim(self) -> None:
        """Forget what has been idle for too long, and the least recently used of what is too much, runs before threads.
        What has a pinned message stays."""
        # There are no more idle threads than messages that they lease.
        for queue, most in ((self._runs, IDLE_RUNS), (self._threads, IDLE_MESSAGES)):
            while due := self._due(queue, most):
                self.delete_thread(due)

    def close_inside(self, outer: Scope) -> None:
        """End, with a scope of a caller's, what threads have leased in it."""
        for held in self._inside.pop(outer, ()):
            self.table.close(held.scopes.pop(outer))
            if not held.users:
                self._count(held)

    def drop_tenant(self, tenant: str) -> None:
        """End all leases of a tenant's threads."""
        for held in self._held.pop(tenant, {}).values():
            self.delete_thread(held)

    def names(self, tenant: str | None) -> int:
        """Count the threads and runs, of one tenant or of all, that are used or hold something."""
        return sum(map(len, self._held.values() if tenant is None else [self._held.get(tenant, {})]))

    def check(self) -> None:
        """Assert that what is idle is counted."""
        idle, every = [*self._runs, *self._threads], [*chain(*(held.values() for held in self._held.values()))]
        assert {*idle} == {held for held in every if not held.users} and all(map(self._is_held, every))
        assert self._idle_messages == sum(held.messages for held in idle)
        for held in every:
            assert all(not scope.closed and scope.outer is outer for outer, scope in held.scopes.items())

    def delete_thread(self, held: ThreadLease) -> None:
        """Give back what a thread leases."""
        self._wake(held)
        if self._is_held(held):
            del self._held[held.tenant][held.name]
        scopes, held.scopes = held.scopes, {}
        for outer, scope in scopes.items():
            self._inside[outer].discard(held)
            self.table.close(scope, forgotten=True)

    def _is_held(self, held: ThreadLease) -> bool:
        return self._held.get(held.tenant, {}).get(held.name) is held

    def _due(self, queue: OrderedDict[ThreadLease, None], most: int) -> ThreadLease | None:
        since = self.clock() - IDLE_S
        for held in queue:
            if held.used_s > since and len(queue) <= most and self._idle_messages <= IDLE_MESSAGES:
                break
            messages = chain(*(self.table.held_in(scope) for scope in held.scopes.values()))
            if not any(message.entry is not None and message.entry.pins for message in messages):
                return held
        return None

    def _queue(self, held: ThreadLease) -> OrderedDict[ThreadLease, None]:
        return self._runs if isinstance(held.name, EphemeralRun) and held.name.is_whole else self._threads

    def _count(self, held: ThreadLease) -> None:
        """See how much an idle one leases; there is nothing to know of one that leases nothing."""
        before, held.messages = held.messages, sum(len(self.table.held_in(scope)) for scope in held.scopes.values())
        self._idle_messages += held.messages - before
        if not held.messages:
            self.delete_thread(held)

    def _wake(self, held: ThreadLease) -> None:
        self._queue(held).pop(held, None)
        self._idle_messages -= held.messages
        held.messages = 0


class Threads:
    """Of one tenant: `engine.threads`. A thread is known by its id; graphs hold and forget what they run.

    Args:
        holdings: Of all tenants.
        tenant: Its name.
        scopes: Names its scopes.
    """

    def __init__(self, thread_leases: ThreadLeases, tenant: str, scopes: object) -> None:
        self._all, self._tenant, self._scopes = thread_leases, tenant, scopes

    @contextmanager
    def used(self, name: Name) -> Iterator[ThreadLease]:
        """A block in which nothing of a thread is forgotten.

        Raises:
            ThreadBusyError: It is being forgotten.
        """
        with self._all.lock:
            held = self._all.woken(self._tenant, name)
            if held.users < 0:
                raise ThreadBusyError(f"thread {name!r} is being forgotten: run it when that is done")
            held.users += 1
        try:
            yield held
        finally:
            if not self._all.lock.is_the_parents:
                with self._all.lock:
                    held.users -= 1
                    held.used_s = self._all.clock()
                    self._all.rest(held)

    @contextmanager
    def speaking(self, name: Name) -> Iterator[Scope]:
        """The same, whose calls lease what they make for the thread. Raises what `used` raises."""
        with self.used(name) as held:
            with self._all.lock:
                scope = self._all.scope(held, Scope.current(self._scopes))
            with scope.entered(self._scopes):
                yield scope

    def hold(self, handles: Iterable[MessageHandle], scope: Scope | None = None) -> None:
        """Have a thread lease those of these messages that are still there, if it does not; or the caller's scope, if
        one is open."""
        table, scope = self._all.table, scope or Scope.current(self._scopes)
        if scope is None:
            return
        with self._all.lock:
            for message in [table.get(handle.id) for handle in handles if not scope.closed]:
                if message is not None and message.tenant == self._tenant and not message.scoped[scope]:
                    table.lease(message, scope)

    def forget(self, thread: str) -> None:
        """Give back a thread's leases. What others lease stays; handles of the rest are unknown from then on.

        Raises:
            ThreadBusyError: It is under way.
        """
        with self.forgetting(thread):
            pass

    @contextmanager
    def forgetting(self, thread: str) -> Iterator[ThreadLease]:
        """A block in which nobody can use a thread, and after which it is forgotten unless the block fails.

        Yields:
            What it leases.

        Raises:
            ThreadBusyError: It is under way.
        """
        with self._all.lock:
            held = self._all.woken(self._tenant, thread)
            if held.users:
                raise ThreadBusyError(
                    f"thread {thread!r} is under way, and what it reads is not dropped: forget it when its runs have "
                    "ended"
                )
            held.users = -1
        try:
            yield held
            with self._all.lock:
                self._all.delete_thread(held)
        finally:
            with self._all.lock:
                held.users = 0
                self._all.rest(held)

    def expire(self) -> None:
        """Forget now what has been idle for too long, of all tenants: else that waits until a run begins or ends."""
        with self._all.lock:
            self._all.trim()
