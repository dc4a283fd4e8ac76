"""The tenants of one engine, by their salts."""

from __future__ import annotations

import threading

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.quota import Quota
from choreo_agents.engine.tenant import Tenant


class Tenants:
    """May be used from any thread.

    Args:
        core: Serves them.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._open: dict[str, Tenant] = {}
        self._changing = threading.RLock()
        """Held, besides the engine's lock, while one comes or goes: one that comes again finds nothing of before."""

    def open(self, salt: str, quota: Quota | None) -> Tenant:
        """The tenant with this salt, who may take so much from now on; None: as before."""
        with self._changing:
            if salt not in self._open:
                self._open[salt] = Tenant(self.core, salt)
            tenant = self._open[salt]
            if quota is not None:
                tenant.limit(quota)
            return tenant

    def close(self, tenant: Tenant) -> None:
        """End a tenancy: see `Engine.close`."""
        with self._changing:
            tenant.close()
            self._open = {salt: each for salt, each in self._open.items() if each is not tenant}

    def names(self) -> list[str]:
        """Of all that are open; they do not tell their salts."""
        return [tenant.name for tenant in self._open.values()]
