"""Leases held between calls, by threads of graphs and by runs without a checkpointer.

running     has users: nothing of it is dropped
idle        has no users: deleted after a time, or when there is too much, least recently used first
deleted     its leases are dropped; messages that others lease, or that are pinned, stay
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
"""Seconds after which an unused thread of a graph is deleted: its leases are dropped, and a later run encodes its text
again."""
IDLE_MESSAGES = 1 << 14
"""Most messages that idle threads lease; one that two threads lease counts twice. Beyond that, the least recently used
thread is deleted, of any tenant."""
IDLE_RUNS = 64
"""Runs without a checkpointer whose leases are kept, the last ones: so that you can inspect them, or go on by passing
their state."""


@dataclass(frozen=True, eq=False)
class EphemeralRun:
    """Stands for a thread where no checkpointer keeps one: nothing continues it."""

    is_whole: bool = True
    """Whether it is a whole run, which ends with its last user. Else it is one call, whose answer others may read."""


Name = str | EphemeralRun


@dataclass(eq=False)
class ThreadLease:
    """Leases of one thread."""

    tenant: str
    name: Name
    scopes: dict[Scope | None, Scope] = field(default_factory=dict)
    """Its scopes, by the caller's scope with which each ends."""
    users: int = 0
    """Number of running runs and calls; -1 while it is being deleted."""
    used_s: float = 0.0
    """Time at which the last of them ended."""
    messages: int = 0
    """Number of messages it leases, while it is idle."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Data that other objects keep with it, by object: dropped when it is deleted."""


class ThreadLeases:
    """Leases of all threads of one engine. Used under the engine's lock only.

    Args:
        table: Table of the messages.
        lock: The engine's lock.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Clock, in seconds."""

    def __init__(self, table: MessageTable, lock: EngineLock) -> None:
        self.table, self.lock = table, lock
        self._leases: defaultdict[str, dict[Name, ThreadLease]] = defaultdict(dict)
        """Leases by tenant and thread name."""
        self._inside: defaultdict[Scope | None, set[ThreadLease]] = defaultdict(set)
        """Leases that have a scope which ends with this one, or with none."""
        self._runs: OrderedDict[ThreadLease, None] = OrderedDict()
        """Idle runs, and `_threads` likewise, the least recently used first."""
        self._threads: OrderedDict[ThreadLease, None] = OrderedDict()
        self._idle_messages = 0
        """Number of messages that idle threads and runs lease."""

    def woken(self, tenant: str, name: Name) -> ThreadLease:
        """Return a thread's leases, and mark it as not idle."""
        lease = self._leases[tenant].setdefault(name, ThreadLease(tenant, name))
        self._wake(lease)
        return lease

    def rest(self, lease: ThreadLease) -> None:
        """Mark a thread without users as idle; then delete threads that were idle for too long or are too many."""
        if not lease.users and self._is_listed(lease):
            self._queue(lease)[lease] = None
            self._count(lease)
        self.trim()

    def scope(self, lease: ThreadLease, outer: Scope | None) -> Scope:
        """Return the scope for a call's leases in the thread, which ends with that of its caller.

        A caller's scope that is itself a thread's is skipped: a function that makes an agent's text may run a graph.
        """
        while outer is not None and (outer.closed or outer.is_threads):
            outer = outer.outer
        if outer not in lease.scopes:
            lease.scopes[outer] = Scope(outer, is_threads=True)
            self._inside[outer].add(lease)
        return lease.scopes[outer]

    def trim(self) -> None:
        """Delete what was idle for too long, and the least recently used of what is too much, runs before threads. A
        thread with a pinned message stays."""
        # An idle thread leases at least one message, so IDLE_MESSAGES bounds the threads, too.
        for queue, most in ((self._runs, IDLE_RUNS), (self._threads, IDLE_MESSAGES)):
            while due := self._find_due(queue, most):
                self.delete_thread(due)

    def close_inside(self, outer: Scope) -> None:
        """Drop, with a caller's scope, the leases that threads have taken in it."""
        for lease in self._inside.pop(outer, ()):
            self.table.close(lease.scopes.pop(outer))
            if not lease.users:
                self._count(lease)

    def drop_tenant(self, tenant: str) -> None:
        """Drop all leases of a tenant's threads."""
        for lease in self._leases.pop(tenant, {}).values():
            self.delete_thread(lease)

    def names(self, tenant: str | None) -> int:
        """Return the number of threads and runs, of one tenant or of all, that have users or leases."""
        return sum(map(len, self._leases.values() if tenant is None else [self._leases.get(tenant, {})]))

    def check(self) -> None:
        """Assert that idle threads are counted."""
        idle, every = [*self._runs, *self._threads], [*chain(*(by_name.values() for by_name in self._leases.values()))]
        assert {*idle} == {lease for lease in every if not lease.users} and all(map(self._is_listed, every))
        assert self._idle_messages == sum(lease.messages for lease in idle)
        for lease in every:
            assert all(not scope.closed and scope.outer is outer for outer, scope in lease.scopes.items())

    def delete_thread(self, lease: ThreadLease) -> None:
        """Drop a thread's leases."""
        self._wake(lease)
        if self._is_listed(lease):
            del self._leases[lease.tenant][lease.name]
        scopes, lease.scopes = lease.scopes, {}
        for outer, scope in scopes.items():
            self._inside[outer].discard(lease)
            self.table.close(scope, forgotten=True)

    def _is_listed(self, lease: ThreadLease) -> bool:
        return self._leases.get(lease.tenant, {}).get(lease.name) is lease

    def _find_due(self, queue: OrderedDict[ThreadLease, None], most: int) -> ThreadLease | None:
        since = self.clock() - IDLE_S
        for lease in queue:
            if lease.used_s > since and len(queue) <= most and self._idle_messages <= IDLE_MESSAGES:
                break
            messages = chain(*(self.table.leased_in(scope) for scope in lease.scopes.values()))
            if not any(message.entry is not None and message.entry.pins for message in messages):
                return lease
        return None

    def _queue(self, lease: ThreadLease) -> OrderedDict[ThreadLease, None]:
        return self._runs if isinstance(lease.name, EphemeralRun) and lease.name.is_whole else self._threads

    def _count(self, lease: ThreadLease) -> None:
        """Update how many messages an idle thread leases; delete it if there are none."""
        before = lease.messages
        lease.messages = sum(len(self.table.leased_in(scope)) for scope in lease.scopes.values())
        self._idle_messages += lease.messages - before
        if not lease.messages:
            self.delete_thread(lease)

    def _wake(self, lease: ThreadLease) -> None:
        self._queue(lease).pop(lease, None)
        self._idle_messages -= lease.messages
        lease.messages = 0


class Threads:
    """Threads of one tenant: `engine.threads`. A thread is known by its id; graphs use and delete those they run.

    Args:
        thread_leases: Leases of all tenants.
        tenant: Name of the tenant.
        scopes: Key of its scopes.
    """

    def __init__(self, thread_leases: ThreadLeases, tenant: str, scopes: object) -> None:
        self._all, self._tenant, self._scopes = thread_leases, tenant, scopes

    @contextmanager
    def used(self, name: Name) -> Iterator[ThreadLease]:
        """Use a thread for a block, in which none of its leases is dropped.

        Raises:
            ThreadBusyError: It is being deleted.
        """
        with self._all.lock:
            lease = self._all.woken(self._tenant, name)
            if lease.users < 0:
                raise ThreadBusyError(f"thread {name!r} is being deleted: run it again after that")
            lease.users += 1
        try:
            yield lease
        finally:
            if not self._all.lock.is_the_parents:
                with self._all.lock:
                    lease.users -= 1
                    lease.used_s = self._all.clock()
                    self._all.rest(lease)

    @contextmanager
    def speaking(self, name: Name) -> Iterator[Scope]:
        """Use a thread for a block whose calls lease their messages for it. Raises what `used` raises."""
        with self.used(name) as lease:
            with self._all.lock:
                scope = self._all.scope(lease, Scope.current(self._scopes))
            with scope.entered(self._scopes):
                yield scope

    def hold(self, handles: Iterable[MessageHandle], scope: Scope | None = None) -> None:
        """Lease these messages, as far as they still exist, for a thread that does not, or for the open scope of the
        caller."""
        table, scope = self._all.table, scope or Scope.current(self._scopes)
        if scope is None:
            return
        with self._all.lock:
            for message in [table.get(handle.id) for handle in handles if not scope.closed]:
                if message is not None and message.tenant == self._tenant and not message.scoped[scope]:
                    table.lease(message, scope)

    def forget(self, thread: str) -> None:
        """Drop a thread's leases. What others lease stays; handles of the rest are unknown from then on.

        Raises:
            ThreadBusyError: It is running.
        """
        with self.forgetting(thread):
            pass

    @contextmanager
    def forgetting(self, thread: str) -> Iterator[ThreadLease]:
        """Lock a thread for a block, after which it is deleted unless the block raises.

        Yields:
            Its leases.

        Raises:
            ThreadBusyError: It is running.
        """
        with self._all.lock:
            lease = self._all.woken(self._tenant, thread)
            if lease.users:
                raise ThreadBusyError(
                    f"thread {thread!r} is running, and cannot be deleted now: delete it when its runs have ended"
                )
            lease.users = -1
        try:
            yield lease
            with self._all.lock:
                self._all.delete_thread(lease)
        finally:
            with self._all.lock:
                lease.users = 0
                self._all.rest(lease)

    def expire(self) -> None:
        """Delete now what was idle for too long, of all tenants; otherwise that happens when a run begins or ends."""
        with self._all.lock:
            self._all.trim()
