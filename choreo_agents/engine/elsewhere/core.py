"""An engine that knows all messages and computes none: others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.elsewhere.loop import ElsewhereLoop
from choreo_agents.engine.elsewhere.method import ElsewhereMethod
from choreo_agents.engine.elsewhere.sending import FarEngine, Greeting
from choreo_agents.engine.engine import Engine
from choreo_agents.engine.owner import EngineOwner
from choreo_agents.engine.quota import Quota
from choreo_agents.engine.settings import Memory, Settings
from choreo_agents.engine.tenants import Tenants
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.entry_files import EntryFiles
from choreo_agents.kv.store.host import HostTier
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventSink, discard

_LEAST_BLOCK = 16


def engine_over(
    model: LoadedModel,
    engines: Sequence[FarEngine],
    *,
    seed: int = 0,
    salt: str = "",
    quota: Quota | None = None,
    sink: EventSink = discard,
) -> Engine:
    """An engine whose calls others run.

    Args:
        model: Theirs. Its weights are not used here.
        engines: At least one, of this model, which serve nobody else.
        seed: As for `Engine.load`, and `salt`, `quota` and `sink`.
        salt: The tenant's.
        quota: The tenant's.
        sink: Of the front's events.

    Raises:
        InvalidRequestError: An engine has another model.
    """
    budget = _LEAST_BLOCK * model.adapter.geometry.bytes_per_token
    settings = Settings.model_validate({"memory": Memory(kv_budget_bytes=budget), "seed": seed, "sink": sink})
    core = ElsewhereCore(model, settings, engines)
    tenants = Tenants(core)
    return Engine(tenants, salt, quota, EngineOwner(tenants))


class ElsewhereCore(EngineCore):
    """The front of engines elsewhere.

    Args:
        model: Theirs.
        settings: Of the front.
        engines: Compute.
    """

    def __init__(self, model: LoadedModel, settings: Settings, engines: Sequence[FarEngine]) -> None:
        self._engines = engines
        self._total_tokens = 0
        super().__init__(model, settings)
        self._total_tokens = self._there.greet(Greeting(self.secret, model.adapter.fingerprint))

    @property
    def total_tokens(self) -> int:
        """That the smallest of its engines has room for."""
        return self._total_tokens

    def _cache(self, host: HostTier[CacheEntry], files: EntryFiles) -> KVCache:
        return _WatchedCache(self, host, files)

    def _method(self) -> Any:
        return ElsewhereMethod(self.table)

    def _loop(self) -> Any:
        self._there = ElsewhereLoop(self._engines, self.table, self.lock, self.counters, self.settings.sink, self.pool)
        return self._there

    def dropped(self, message_id: str) -> None:
        """The front needs a message no longer."""
        self._there.forget(message_id)


class _WatchedCache(KVCache):
    """Says what is dropped.

    Args:
        core: Is told.
        host: Of nothing.
        files: Of nothing.
    """

    def __init__(self, core: ElsewhereCore, host: HostTier[CacheEntry], files: EntryFiles) -> None:
        super().__init__(core.pool, host, files, core.movements)
        self._core = ref(core)

    def drop(self, entry: CacheEntry) -> None:
        super().drop(entry)
        if (core := self._core()) is not None:
            core.dropped(entry.key)
