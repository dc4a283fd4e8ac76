"""Execution of an engine's requests on remote engines: it knows all messages, and computes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from choreo_agents.engine.delegation import (
    CacheEntry,
    Completion,
    Computing,
    EngineCore,
    Execution,
    KVCache,
    MessageIds,
)
from choreo_agents.tracing import guarded
from choreo_ray.remote.dispatcher import RequestDispatcher
from choreo_ray.remote.fleet import Fleet
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.loop import RemoteLoop
from choreo_ray.remote.method import RemoteMethod
from choreo_ray.remote.protocol import Hello, SentAdapter

_OTHERS = "engines elsewhere"


class RemoteExecution(Execution):
    """Execution on remote engines, as their router (see `Execution`).

    Args:
        fleet: The engines.
        greeting: Greeting that the router sends them.
        patience_s: Seconds that calls wait while no engine is up.
    """

    def __init__(self, fleet: Fleet, greeting: Hello, patience_s: float) -> None:
        self.fleet, self._greeting, self._patience_s = fleet, greeting, patience_s
        self._sent = list[SentAdapter]()
        """Adapters that tenants have loaded; kept here, since each restart makes a new loop."""
        self._has_begun = False

    def cache(self, *parts: Any) -> KVCache:
        """See `Execution`."""
        return _WatchedCache(self, *parts)

    def method(self, core: EngineCore) -> RemoteMethod:
        """See `Execution`."""
        return RemoteMethod(core.table, self._close_tenant)

    def loop(self, core: EngineCore) -> RemoteLoop:
        """See `Execution`."""
        sink, lock, router = core.settings.sink, core.lock, self._greeting.router
        self._table = core.table
        self._health = HealthMonitor(self.fleet, self._greeting, lock, sink, self._patience_s, self._sent)
        self._dispatcher = RequestDispatcher(self.fleet, self._health, core.table, core.counters, lock, sink, router)
        completion = Completion(core.pool, core.counters, guarded(sink), lock.condition())
        self._loop = RemoteLoop(self._dispatcher, completion, lock, sink)
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
            self._loop.wait_for(self._health.greet_again())
            return
        core.total_tokens = self._loop.wait_for(self._health.greet_all())
        core.kv_budget_bytes = sum(replica.kv_budget_bytes for replica in self.fleet.alive())
        self._has_begun = True

    def load_adapter(self, core: EngineCore, folder: Path, name: str, message_ids: MessageIds) -> None:
        """Load an adapter in all engines (see `Execution`)."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        with core.lock:
            self._dispatcher.releases.salts[message_ids.tenant] = message_ids.salt
        self._loop.wait_for(self._health.load_adapter(name, files, message_ids.salt))

    def require_ready(self) -> None:
        """Ask the engines whether one of them answers (see `Execution`)."""
        self._loop.wait_for(self._health.require_answer())

    def computing(self) -> Computing:
        """See `Execution`."""
        return Computing(_OTHERS, "", _OTHERS)

    def drain(self, name: str) -> int:
        """Place nothing new on an engine, and copy its messages to others; return how many were copied."""
        return int(self._loop.wait_for(self._dispatcher.copies.hand_over(name, self._table.known)))

    def release_message(self, message_id: str) -> None:
        """Release a message that the router no longer needs. Under the lock."""
        self._dispatcher.releases.release_message(message_id)

    def held_bytes(self, tenant: str | None) -> int:
        """Return the bytes of KV of a tenant's messages, or of all, that engines hold for the router. Under the
        lock.
        """
        return self.fleet.held_bytes(self._table.known, tenant)

    def _close_tenant(self, tenant: str) -> None:
        """Close a tenant at the engines. Under the lock."""
        self._dispatcher.releases.close_tenant(tenant)


class _WatchedCache(KVCache):
    """A cache that reports what it drops, and counts the KV that remote engines hold.

    Args:
        execution: Hears of dropped messages.
        parts: Arguments of `KVCache`, which has nothing on the host or in files.
    """

    def __init__(self, execution: RemoteExecution, *parts: Any) -> None:
        super().__init__(*parts)
        self._execution = execution

    def bytes_by_tier(self, tenant: str | None = None) -> dict[str, int]:
        """Return the bytes that the router's engines hold (see `KVCache`)."""
        return {"kv_bytes": self._execution.held_bytes(tenant), "host_bytes": 0, "disk_bytes": 0}

    def is_elsewhere(self, message_id: str) -> bool:
        """See `KVCache`."""
        return bool(self._execution.fleet.holders(message_id))

    def drop(self, entry: CacheEntry) -> None:
        """See `KVCache`."""
        super().drop(entry)
        self._execution.release_message(entry.key)
