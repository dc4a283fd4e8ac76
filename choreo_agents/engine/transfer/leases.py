"""Leases that end together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import EngineClosedError, HandleError
from choreo_agents.kv.handle import MessageHandle


@dataclass
class Leases:
    """Leases that are dropped together, in whichever scope that happens."""

    tenant: Tenant
    scope: Scope | None
    """In which they were taken: if it has ended, they have ended with it."""
    handles: list[MessageHandle]

    def add(self, handles: Sequence[MessageHandle]) -> None:
        """Take over leases that came with handles, from calls of the same scope."""
        self.handles.extend(handles)

    def release(self) -> None:
        """Drop them; once."""
        handles, self.handles = self.handles, []
        for handle in handles if self.scope is None or not self.scope.closed else ():
            with suppress(HandleError, EngineClosedError):
                self.tenant.release(handle, self.scope, spare_only=False)
