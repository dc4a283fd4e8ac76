"""What threads of graphs hold between their calls, and how it is given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from choreo_agents.engine.calling import Caller
from choreo_agents.engine.messages.holdings import Holding, Name
from choreo_agents.engine.messages.scope import Scope, inside
from choreo_agents.kv.handle import MessageHandle


class Threads:
    """Of one tenant: `engine.threads`. A thread is known by its id; graphs hold and forget what they run.

    Args:
        caller: Makes the tenant's calls.
    """

    def __init__(self, caller: Caller) -> None:
        self._tenant, self._core, self._caller = caller.tenant, caller.tenant.core, caller

    @contextmanager
    def used(self, name: Name) -> Iterator[Holding]:
        """A block in which nothing of a thread is forgotten.

        Raises:
            ThreadBusyError: It is being forgotten.
        """
        core = self._core
        with core.lock:
            held = core.holdings.begin(self._tenant.name, name)
        try:
            yield held
        finally:
            if not core.lock.is_the_parents:
                with core.lock:
                    core.holdings.end(held)

    @contextmanager
    def speaking(self, name: Name) -> Iterator[Scope]:
        """The same, whose calls lease what they make for the thread. Raises what `used` raises."""
        with self.used(name) as held:
            with self._core.lock:
                scope = self._core.holdings.scope(held, self._caller.scope())
            with inside(self._tenant.scopes, scope):
                yield scope

    def hold(self, handles: Iterable[MessageHandle], scope: Scope | None = None) -> None:
        """Have a thread lease those of these messages that are still there, if it does not; or the caller's scope, if
        one is open."""
        table, tenant, scope = self._core.table, self._tenant.name, scope or self._caller.scope()
        if scope is None:
            return
        with self._core.lock:
            for message in [table.get(handle.id) for handle in handles if not scope.closed]:
                if message is not None and message.tenant == tenant and not message.scoped[scope]:
                    table.lease(message, scope)

    def forget(self, thread: str) -> None:
        """Give back a thread's leases. What others lease stays; handles of the rest are unknown from then on.

        Raises:
            ThreadBusyError: It is under way.
        """
        with self.forgetting(thread):
            pass

    @contextmanager
    def forgetting(self, thread: str) -> Iterator[None]:
        """A block in which nobody can use a thread, and after which it is forgotten unless the block fails.

        Raises:
            ThreadBusyError: It is under way.
        """
        core, forgotten = self._core, False
        with core.lock:
            held = core.holdings.leave(self._tenant.name, thread)
        try:
            yield
            forgotten = True
        finally:
            with core.lock:
                core.holdings.left(held, forgotten=forgotten)

    def expire(self) -> None:
        """Forget now what has been idle for too long, of all tenants: else that waits until a run begins or ends."""
        with self._core.lock:
            self._core.holdings.trim()
