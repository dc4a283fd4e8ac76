"""All tenants of one engine, and what only whoever loaded it may do."""

from __future__ import annotations

from collections.abc import Mapping

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.stock import EngineStats, LeasedMemory, MemoryMap, leased_memory, memory_map_of, stats_of
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import EngineClosedError, InvalidRequestError


class EngineOwner:
    """All tenants' engine: `engine.owner`, of the engine that `Engine.load` returns. May be used from any thread.

    Args:
        core: Serves them.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._open: dict[str, Tenant] = {}
        """By salt."""
        self._closed = core.lock.condition()

    def open(self, salt: str, calls_per_second: float | None = None) -> Tenant:
        """Return the tenant with this salt; for `calls_per_second` see `Engine.tenant`.

        One that is being closed comes again when that is over, and finds nothing of before.

        Raises:
            InvalidRequestError: The rate is not above 0.
            EngineClosedError: It is being closed, and this is the engine's thread, for which that waits.
        """
        if not isinstance(salt, str):
            raise InvalidRequestError(f"a salt must be a text, not {salt!r}")
        # Folders are made and looked into without the lock.
        made = None if salt in self._open else Tenant(self.core, salt)
        with self.core.lock:
            while (tenant := self._open.get(salt)) is not None and tenant.closing:
                if self.core.loop.is_here:
                    raise EngineClosedError("this tenancy is being closed: begin it again when that is over")
                self._closed.wait()
            tenant = tenant or made or Tenant(self.core, salt)
            if calls_per_second is not None:
                tenant.limiter.set_rate(calls_per_second)
            if tenant.kept is not None and tenant.kept.store is not None:
                self.core.kept[tenant.name] = tenant.kept.store
            self._open[salt] = tenant
            return tenant

    def close_tenant(self, tenant: Tenant) -> None:
        """End a tenancy: see `Engine.close`."""
        with self.core.lock:
            if tenant.closing:
                if not self.core.loop.is_here:
                    self._closed.wait_for(lambda: tenant not in self._open.values())
                return
            tenant.closing = True
        try:
            tenant.close()  # waits for the engine's thread, which may be opening another
        finally:
            with self.core.lock:
                self._open = {salt: each for salt, each in self._open.items() if each is not tenant}
                self._closed.notify_all()

    def tenants(self) -> Mapping[str, LeasedMemory]:
        """What every open tenant leases: by a name that does not tell its salt, and that folders of its files have."""
        with self.core.lock:
            self.core.cache.files.arrive_all()
            held = leased_memory(self.core.table.messages(), lambda message: message.tenant, self.core.cache)
            return {each.name: held.get(each.name, LeasedMemory()) for each in self._open.values()}

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far, for all tenants together."""
        return stats_of(self.core)

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which authors keep it there, those of all tenants together."""
        return memory_map_of(self.core)

    def restart(self) -> None:
        """Start again with empty memory; unfinished calls fail with `EngineClosedError`.

        Also after a failure that has ended its thread. Handles stay good: what is read again is computed again.

        Raises:
            EngineClosedError: The engine was closed, and stays so.
        """
        self.core.restart()

    def close(self) -> None:
        """Write what is to be kept, and stop the engine for all tenants; unfinished calls fail with
        `EngineClosedError`."""
        if self.core.lock.is_the_parents:
            return
        for tenant in [*self._open.values()]:
            tenant.stop()
        self.core.close()
