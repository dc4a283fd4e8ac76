"""What only whoever loaded an engine may do."""

from __future__ import annotations

from collections.abc import Mapping

from choreo_agents.engine.stock.memory_map import LeasedMemory, MemoryMap, leased_memory
from choreo_agents.engine.stock.stats import EngineStats
from choreo_agents.engine.taking_stock import memory_map_of, stats_of
from choreo_agents.engine.tenants import Tenants


class EngineOwner:
    """All tenants' engine: `engine.owner`, of the engine that `Engine.load` returns."""

    def __init__(self, tenants: Tenants) -> None:
        self.registry = tenants
        """The tenants themselves, for who has the engine compute for other processes."""
        self._core = tenants.core

    def tenants(self) -> Mapping[str, LeasedMemory]:
        """What every open tenant leases: by a name that does not tell its salt, and that folders of its files have."""
        core = self._core
        with core.lock:
            core.cache.files.arrive_all()
            held = leased_memory(core.table.messages(), lambda message: message.tenant, core.cache)
            return {name: held.get(name, LeasedMemory()) for name in self.registry.names()}

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far, for all tenants together."""
        return stats_of(self._core)

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which authors keep it there, those of all tenants together."""
        return memory_map_of(self._core)

    def restart(self) -> None:
        """Start again with empty memory; unfinished calls fail with `EngineClosedError`.

        Also after a failure that has ended its thread. Handles stay good: what is read again is computed again.

        Raises:
            EngineClosedError: The engine was closed, and stays so.
        """
        self._core.restart()

    def close(self) -> None:
        """Write what is to be kept, and stop the engine for all tenants; unfinished calls fail with
        `EngineClosedError`."""
        self.registry.write_kept()
        self._core.close()
