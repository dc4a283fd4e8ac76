"""The tenants of one engine, by their salts."""

from __future__ import annotations

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import EngineClosedError


class Tenants:
    """May be used from any thread.

    Args:
        core: Serves them.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._open: dict[str, Tenant] = {}
        self._closing: set[Tenant] = set()
        self._closed = core.lock.condition()

    def open(self, salt: str, calls_per_second: float | None = None) -> Tenant:
        """Return the tenant with this salt, so many of whose calls may start in a second; None: as before.

        One that is being closed comes again when that is over, and finds nothing of before.

        Raises:
            InvalidRequestError: The rate is not above 0.
            EngineClosedError: It is being closed, and this is the engine's thread, for which that waits.
        """
        # Folders are made and looked into without the lock.
        made = None if salt in self._open else Tenant(self.core, salt)
        with self.core.lock:
            while self._open.get(salt) in self._closing:
                if self.core.loop.is_here:
                    raise EngineClosedError("this tenancy is being closed: begin it again when that is over")
                self._closed.wait()
            tenant = self._open.get(salt) or made or Tenant(self.core, salt)
            if calls_per_second is not None:
                tenant.limit(calls_per_second)
            if salt not in self._open:
                self._open[salt] = tenant
                tenant.begin()
            return tenant

    def close(self, tenant: Tenant) -> None:
        """End a tenancy: see `Engine.close`."""
        with self.core.lock:
            if tenant in self._closing:
                if not self.core.loop.is_here:
                    self._closed.wait_for(lambda: tenant not in self._closing)
                return
            self._closing.add(tenant)
        try:
            tenant.close()  # waits for the engine's thread, which may be opening another
        finally:
            with self.core.lock:
                self._open = {salt: each for salt, each in self._open.items() if each is not tenant}
                self._closing.remove(tenant)
                self._closed.notify_all()

    def write_kept(self) -> None:
        """Write what all of them are to keep, and have nothing more kept: the engine is to be closed."""
        if self.core.lock.is_the_parents:
            return
        with self.core.lock:
            keeping = [tenant.kept for tenant in self._open.values() if tenant.kept is not None]
        for kept in keeping:
            kept.close()

    def names(self) -> list[str]:
        """Of all that are open; they do not tell their salts."""
        with self.core.lock:
            return [tenant.name for tenant in self._open.values()]
