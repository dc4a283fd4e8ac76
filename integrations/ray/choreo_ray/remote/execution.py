"""Execution of an engine's requests on remote engines: it knows all messages, and computes none."""

from __future__ import annotations

import secrets
from pathlib import Path

from choreo_agents.engine.delegation import ActiveRequests, EngineCore, Execution
from choreo_ray.remote.context import RouterContext
from choreo_ray.remote.dispatcher import RequestDispatcher
from choreo_ray.remote.fleet import Fleet
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.loop import RemoteLoop
from choreo_ray.remote.protocol import Hello, SentAdapter, own_version


class RemoteExecution(Execution):
    """Execution on remote engines, as their router (see `Execution`).

    Args:
        fleet: The engines.
        patience_s: Seconds that calls wait while no engine is up.
    """

    elsewhere = "engines elsewhere"

    def __init__(self, fleet: Fleet, patience_s: float) -> None:
        self.fleet, self._patience_s = fleet, patience_s
        self._router = secrets.token_hex(16)
        self._sent = list[SentAdapter]()
        """Adapters that tenants have loaded; kept here, since each restart makes a new loop."""
        self._has_begun = False

    def loop(self, core: EngineCore) -> RemoteLoop:
        """See `Execution`."""
        self._context = context = RouterContext(self._router, self.fleet, core)
        greeting = Hello(self._router, core.model.adapter.fingerprint, own_version(), core.adapters.default_key)
        self._health = HealthMonitor(context, greeting, self._patience_s, self._sent)
        active = ActiveRequests(core.pool, core.method, core.counters, context.emit, core.lock.condition())
        self._dispatcher = RequestDispatcher(context, self._health, active)
        self._loop = RemoteLoop(context, self._dispatcher, active)
        return self._loop

    def begin(self, core: EngineCore) -> None:
        """Greet all engines (see `Execution`). At a restart all that they hold for this router is released.

        An engine that is gone at a restart is greeted later.

        Raises:
            EngineMismatchError: An engine cannot work with the others. EngineLostError: One does not answer, or none at
                a restart.
        """
        if self._has_begun:
            with core.lock:
                for name in self.fleet.replicas:
                    self.fleet.lost(name)
        self._loop.wait_for(self._health.greet_all(again=self._has_begun))
        if not self._has_begun:
            core.total_tokens = min(replica.total_tokens for replica in self.fleet.replicas.values())
            core.kv_budget_bytes = sum(replica.kv_budget_bytes for replica in self.fleet.alive())
        self._has_begun = True

    def load_adapter(self, folder: Path, name: str, salt: str) -> None:
        """Load an adapter in all engines (see `Execution`)."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        self._loop.wait_for(self._health.load_adapter(name, files, salt))

    def close_tenant(self, tenant: str, salt: str) -> None:
        """Close a tenant at the engines (see `Execution`)."""
        self._health.close_tenant(tenant, salt)

    def release(self, message_id: str) -> None:
        """Release a message at the engines (see `Execution`)."""
        self._health.release_message(message_id)

    def holds(self, message_id: str) -> bool:
        """See `Execution`."""
        return bool(self.fleet.holders(message_id))

    def bytes_by_tier(self, cache: object, tenant: str | None) -> dict[str, int]:
        """Return the bytes of KV that the engines hold for the router (see `Execution`)."""
        held_bytes = self.fleet.held_bytes(self._context.table.known, tenant)
        return {"kv_bytes": held_bytes, "host_bytes": 0, "disk_bytes": 0}

    def require_ready(self) -> None:
        """Ask the engines whether one of them answers (see `Execution`)."""
        self._loop.wait_for(self._health.require_answer())

    def drain(self, name: str) -> int:
        """Place nothing new on an engine, and copy its messages to others; return how many were copied."""
        return int(self._loop.wait_for(self._dispatcher.copies.hand_over(name)))
