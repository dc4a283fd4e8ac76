"""An engine that knows all messages and computes none: others do."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any
from weakref import ref

from choreo_agents.engine.adapters import Loaded
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.elsewhere.errand import Errands
from choreo_agents.engine.elsewhere.fleet import Fleet
from choreo_agents.engine.elsewhere.loop import ElsewhereLoop
from choreo_agents.engine.elsewhere.method import ElsewhereMethod
from choreo_agents.engine.elsewhere.presence import Presence
from choreo_agents.engine.elsewhere.sending import Greeting, SentAdapter
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.engine.settings import Settings
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.entry_files import EntryFiles
from choreo_agents.kv.hosted import HostedEntries
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.endings import Endings
from choreo_agents.tracing import guarded


class ElsewhereCore(EngineCore):
    """The front of engines elsewhere.

    Args:
        model: Theirs.
        settings: Of the front.
        adapter: What they have loaded for calls that name no other.
        fleet: The engines.
        greeting: What they are told of the front.
        patience_s: Seconds that calls wait while no engine is there.

    Raises:
        EngineMismatchError: An engine cannot work with the others. EngineLostError: One does not answer.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: Settings,
        adapter: Loaded | None,
        fleet: Fleet,
        greeting: Greeting,
        patience_s: float,
    ) -> None:
        self.fleet, self._greeting, self._patience_s = fleet, greeting, patience_s
        self._total_tokens = 0
        self._sent = list[SentAdapter]()
        """What tenants have loaded: of the front, whichever loop it has."""
        super().__init__(model, settings, adapter)
        try:
            self._total_tokens = self._wait_for(self._presence.greet_all())
        except BaseException:
            self.close()
            raise
        self.kv_budget_bytes = sum(outpost.kv_budget_bytes for outpost in self.fleet.alive())

    @property
    def total_tokens(self) -> int:
        """That the smallest of its engines has room for."""
        return self._total_tokens

    def restart(self) -> None:
        """See `EngineCore`: its engines forget what they have for it; one that is gone now is asked again later."""
        super().restart()
        with self.lock:
            for name in self.fleet.outposts:
                self.fleet.lost(name)
        self._wait_for(self._presence.greet_again())

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.wait_for(work)  # type: ignore[attr-defined]

    def _cache(self, host: HostedEntries, files: EntryFiles) -> KVCache:
        return _WatchedCache(self, host, files)

    def _method(self) -> Any:
        return ElsewhereMethod(self.table, partial(_closed, ref(self)))

    def _loop(self) -> Any:
        sink, lock, front = self.settings.sink, self.lock, self._greeting.front
        self._presence = Presence(self.fleet, self._greeting, lock, sink, self._patience_s, self._sent)
        self._errands = Errands(self.fleet, self._presence, self.table, self.counters, lock, sink, front)
        return ElsewhereLoop(
            self._errands, Endings(self.pool, self.counters, guarded(sink), lock.condition()), lock, sink
        )

    def load_adapter(self, loaded: Loaded, name: str | None, naming: Naming) -> str:
        """See `EngineCore`; all engines load it, and then calls can name it."""
        files = {path.name: path.read_bytes() for path in sorted(loaded.folder.iterdir()) if path.is_file()}
        with self.lock:
            given = self.adapters.require_free(loaded, name, naming.tenant)
            self._errands.giving_back.salts[naming.tenant] = naming.salt
        self._wait_for(self._presence.load_adapter(given, files, naming.salt))
        return super().load_adapter(loaded, given, naming)

    def drain(self, name: str) -> int:
        """Have an engine's messages handed over to others, and nothing new placed there; how many were handed over."""
        return int(self._wait_for(self._errands.copies.hand_over(name, self.table.known)))


def _closed(found: ref[ElsewhereCore], tenant: str) -> None:
    """A tenancy has ended. Under the lock."""
    if (core := found()) is not None:
        core._errands.giving_back.close_tenant(tenant)


class _WatchedCache(KVCache):
    """Says what is dropped, and what is kept elsewhere.

    Args:
        core: Is told.
        host: Of nothing.
        files: Of nothing.
    """

    def __init__(self, core: ElsewhereCore, host: HostedEntries, files: EntryFiles) -> None:
        super().__init__(core.pool, host, files, core.movements)
        self._core = ref(core)

    def bytes_by_tier(self, tenant: str | None = None) -> dict[str, int]:
        """See `KVCache`: what its engines have."""
        core = self._core()
        kept = 0 if core is None else core.fleet.kept(core.table.known, tenant)
        return {"device": kept, "host": 0, "disk": 0}

    def looking_for(self, tenants: Iterable[str]) -> list[str]:
        """See `KVCache`: all of them."""
        return [*tenants]

    def is_elsewhere(self, message_id: str) -> bool:
        """See `KVCache`."""
        return (core := self._core()) is not None and bool(core.fleet.holders(message_id))

    def drop(self, entry: CacheEntry) -> None:
        """See `KVCache`."""
        super().drop(entry)
        if (core := self._core()) is not None:
            core._errands.giving_back.dropped(entry.key)
