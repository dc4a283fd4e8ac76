"""What an engine holds and has done, by tier and by who keeps it, and whether its books agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from choreo_agents.engine.core import Computing, EngineCore
from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import TIERS, TierName
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.runtime.counters import Counters
from choreo_agents.tracing import table_html


@dataclass(kw_only=True)
class EngineStats(Computing, TierCounters, Counters):
    """A snapshot: totals since the engine was loaded or the tenancy began, and what there is now.

    A tenant's are its own: steps that held a row of its, their rows that were its, and what these read. Others
    show in `evicted` and `recomputed` alone: one budget is kept for all.
    """

    unfinished: int
    """Requests waiting or running now."""
    messages: int
    """Leased messages now."""
    leases: int
    threads: int
    """Threads of graphs, and runs that no checkpointer keeps, that lease something or are under way now."""
    kv_bytes: int
    """KV memory in use now, in the pool, ..."""
    host_bytes: int
    """... on the host, ..."""
    disk_bytes: int
    """... and on disk."""
    kv_budget_bytes: int
    """Of the engine: all tenants share it."""

    @property
    def rows_per_step(self) -> float:
        """Mean requests served by one forward pass."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def rows_per_decode_step(self) -> float:
        return self.decode_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def unfinished_per_decode_step(self) -> float:
        """Mean requests that were submitted and unfinished: what `rows_per_decode_step` could be at most."""
        return self.decode_unfinished / self.decode_steps if self.decode_steps else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self._told())

    def _repr_html_(self) -> str:
        return table_html("what the engine has done, and holds", ("", ""), self._told())

    def _told(self) -> list[tuple[str, Any]]:
        return [(name.replace("_", " "), value) for name, value in asdict(self).items() if value not in (0, "")]


@dataclass(frozen=True)
class LeasedMemory:
    """The leased messages of one author, or of one tenant."""

    messages: int = 0
    leases: int = 0
    tokens: Mapping[TierName, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens by the fastest tier that has them."""
    pinned_tokens: int = 0


@dataclass(kw_only=True)
class MemoryMap(TierCounters):
    """A snapshot of a tenant's memory, or of all tenants'. Bytes are of KV; a message may be in more than one tier."""

    bytes_per_token: int
    tiers: Mapping[TierName, int]
    """Bytes in each tier, also of what is not leased any more but still cached or read."""
    budgets: Mapping[TierName, int]
    """Bytes that each may hold; 0 for a tier that there is not."""
    authors: Mapping[str, LeasedMemory]
    """By author, `""` for messages of nobody named."""
    hit_rate: float
    """Share of the tokens that calls read or asked to encode that were found encoded."""

    def as_object(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        tiers = (
            (tier, held, held // self.bytes_per_token, self.budgets[tier] or None) for tier, held in self.tiers.items()
        )
        held = (
            (author or "nobody named", kept.messages, kept.leases, *(kept.tokens[tier] for tier in TIERS))
            for author, kept in self.authors.items()
        )
        by_tier = table_html("KV memory by tier", ("tier", "bytes", "tokens", "budget"), tiers)
        columns = ("author", "messages", "leases", *TIERS)
        return by_tier + table_html("tokens by author, and the fastest tier that has them", columns, held)


def leased_memory(
    messages: Iterable[Message], whose: Callable[[Message], str], memory: KVCache
) -> dict[str, LeasedMemory]:
    """Return what messages keep, by whose they are, the largest first.

    Args:
        messages: Leased ones.
        whose: A message is.
        memory: Knows where they are.
    """
    counts: dict[str, Counter[str]] = {}
    for message in messages:
        own, tokens, entry = counts.setdefault(whose(message), Counter()), len(message.tokens), message.entry
        own.update(messages=1, leases=message.leases, pinned=tokens * (entry is not None and entry.pins > 0))
        own[tier_of(message, memory)] += tokens
    made = {
        owner: LeasedMemory(own["messages"], own["leases"], {tier: own[tier] for tier in TIERS}, own["pinned"])
        for owner, own in counts.items()
    }
    return dict(sorted(made.items(), key=lambda item: (-sum(item[1].tokens.values()), item[0])))


def tier_of(message: Message, memory: KVCache) -> TierName:
    """The fastest tier that has it."""
    entry = message.entry
    if memory.is_elsewhere(message.handle.id):
        return "device"
    if entry is not None and not memory.lost(entry) and memory.in_memory(entry):
        return "host" if entry.segment is None else "device"
    has_file = entry is not None and entry.on_disk
    return "disk" if has_file or memory.files.is_kept(message.handle.id, message.tenant) else "lineage"


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
            threads=core.thread_leases.names(tenant),
            **asdict(core.tier_counters.so_far(tenant)),
            **core.cache.bytes_by_tier(tenant),
            kv_budget_bytes=core.kv_budget_bytes,
            **(asdict(core.execution.computing()) | of_all),
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
            **asdict(core.tier_counters.so_far(tenant)),
        )


def check_engine(core: EngineCore) -> None:
    """Assert all invariants of memory and bookkeeping."""
    with core.lock:
        core.pool.check()
        core.table.check()
        core.thread_leases.check()
        core.method.check()
        if not core.loop.unfinished() and core.method.keeps_kv:
            leased = {message.entry for message in core.table.messages()}
            held = core.cache.entries_of(None)
            assert all(entry in leased or entry.wanted for entry in held), "KV outlived its message"
            owned = sum(entry.segment is not None for entry in held)
            assert core.pool.live_segments() == owned, "a segment outlived its message"
