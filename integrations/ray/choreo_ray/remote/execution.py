"""Runs an engine's requests on other engines: it knows all messages and computes none."""

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
    """See `Execution`: the router of engines elsewhere.

    Args:
        fleet: The engines.
        greeting: What they are told of the router.
        patience_s: Seconds that calls wait while no engine is there.
    """

    def __init__(self, fleet: Fleet, greeting: Hello, patience_s: float) -> None:
        self.fleet, self._greeting, self._patience_s = fleet, greeting, patience_s
        self._sent = list[SentAdapter]()
        """What tenants have loaded: of the router, whichever loop it has."""
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
        self._presence = HealthMonitor(self.fleet, self._greeting, lock, sink, self._patience_s, self._sent)
        self._errands = RequestDispatcher(self.fleet, self._presence, core.table, core.counters, lock, sink, router)
        endings = Completion(core.pool, core.counters, guarded(sink), lock.condition())
        self._loop = RemoteLoop(self._errands, endings, lock, sink)
        return self._loop

    def begin(self, core: EngineCore) -> None:
        """See `Execution`: a restarted one has its engines forget what they have for it.

        One that is gone at a restart is asked again later.

        Raises:
            EngineMismatchError: An engine cannot work with the others. EngineLostError: One does not answer, or none
                at a restart.
        """
        if self._has_begun:
            with core.lock:
                for name in self.fleet.replicas:
                    self.fleet.lost(name)
            self._loop.wait_for(self._presence.greet_again())
            return
        core.total_tokens = self._loop.wait_for(self._presence.greet_all())
        core.kv_budget_bytes = sum(replica.kv_budget_bytes for replica in self.fleet.alive())
        self._has_begun = True

    def load_adapter(self, core: EngineCore, folder: Path, name: str, message_ids: MessageIds) -> None:
        """See `Execution`: all engines load it."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        with core.lock:
            self._errands.giving_back.salts[message_ids.tenant] = message_ids.salt
        self._loop.wait_for(self._presence.load_adapter(name, files, message_ids.salt))

    def computing(self) -> Computing:
        """See `Execution`."""
        return Computing(_OTHERS, "", _OTHERS)

    def drain(self, name: str) -> int:
        """Have an engine's messages handed over to others, and nothing new placed there; how many were handed over."""
        return int(self._loop.wait_for(self._errands.copies.hand_over(name, self._table.known)))

    def dropped(self, message_id: str) -> None:
        """The router needs a message no longer. Under the lock."""
        self._errands.giving_back.dropped(message_id)

    def kept(self, tenant: str | None) -> int:
        """Bytes of KV of a tenant's messages, or of all, that engines have for the router. Under the lock."""
        return self.fleet.kept(self._table.known, tenant)

    def _close_tenant(self, tenant: str) -> None:
        """A tenancy has ended. Under the lock."""
        self._errands.giving_back.close_tenant(tenant)


class _WatchedCache(KVCache):
    """Says what is dropped, and what is kept elsewhere.

    Args:
        execution: Is told.
        parts: Of a `KVCache`, which has nothing on the host nor in files.
    """

    def __init__(self, execution: RemoteExecution, *parts: Any) -> None:
        super().__init__(*parts)
        self._execution = execution

    def bytes_by_tier(self, tenant: str | None = None) -> dict[str, int]:
        """See `KVCache`: what its engines have."""
        return {"kv_bytes": self._execution.kept(tenant), "host_bytes": 0, "disk_bytes": 0}

    def is_elsewhere(self, message_id: str) -> bool:
        """See `KVCache`."""
        return bool(self._execution.fleet.holders(message_id))

    def drop(self, entry: CacheEntry) -> None:
        """See `KVCache`."""
        super().drop(entry)
        self._execution.dropped(entry.key)
