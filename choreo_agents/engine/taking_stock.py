"""What an engine holds and has done, and whether its books agree."""

from __future__ import annotations

from dataclasses import asdict

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.stock.memory_map import MemoryMap, leased_memory
from choreo_agents.engine.stock.stats import EngineStats


def stats_of(core: EngineCore, tenant: str | None = None) -> EngineStats:
    """What a tenant holds and has done, or all together."""
    with core.lock:
        messages, leases = core.table.counts(tenant)
        # What a tenant cannot have done alone it is not told.
        of_all: dict[str, int] = {} if tenant is None else {"graphs": 0, "steps_ahead": 0}
        return EngineStats(
            **asdict(core.counters.so_far(tenant)),
            unfinished=core.loop.unfinished() if tenant is None else len(core.loop.requests_of(tenant)),
            messages=messages,
            leases=leases,
            threads=core.holdings.names(tenant),
            **asdict(core.movements.so_far(tenant)),
            **core.cache.bytes_by_tier(tenant),
            kv_budget_bytes=core.kv_budget_bytes,
            **(core.execution.computing()._asdict() | of_all),
        )


def memory_map_of(core: EngineCore, tenant: str | None = None) -> MemoryMap:
    """How much of a tenant's is in each tier, and which of its authors keep it there; or of all together."""
    with core.lock:
        budgets, stats = core.settings.memory, stats_of(core, tenant)
        disk_bytes = 0 if budgets.disk is None else budgets.disk_bytes
        asked = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
        return MemoryMap(
            bytes_per_token=core.pool.geometry.bytes_per_token,
            tiers={"device": stats.kv_bytes, "host": stats.host_bytes, "disk": stats.disk_bytes},
            budgets={"device": core.kv_budget_bytes, "host": budgets.host_bytes, "disk": disk_bytes},
            authors=leased_memory(core.table.messages(tenant), lambda message: message.author or "", core.cache),
            hit_rate=stats.tokens_reused / asked if asked else 0.0,
            **asdict(core.movements.so_far(tenant)),
        )


def check_engine(core: EngineCore) -> None:
    """Assert all invariants of memory and bookkeeping."""
    with core.lock:
        core.pool.check()
        core.table.check()
        core.holdings.check()
        core.method.check()
        if not core.loop.unfinished() and core.method.keeps_kv:
            leased = {message.entry for message in core.table.messages()}
            held = core.cache.entries_of(None)
            assert all(entry in leased or entry.wanted for entry in held), "KV outlived its message"
            owned = sum(entry.segment is not None for entry in held)
            assert core.pool.live_segments() == owned, "a segment outlived its message"
