"""Statistics and memory maps of an engine, by tier and author, and a check of its invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from choreo_agents.engine.core import Computing, EngineCore
from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.entry import TIERS, TierName
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.runtime.counters import Counters
from choreo_agents.tracing import table_html


@dataclass(kw_only=True)
class EngineStats(Computing, TierCounters, Counters):
    """Snapshot of an engine: totals since it was loaded or the tenancy began, and current usage.

    A tenant's counts are its own: steps with a row of its own, those rows, and the KV they read. Other tenants affect
    `evicted` and `recomputed` alone, since they share one budget.
    """

    unfinished: int
    """Requests waiting or running now."""
    messages: int
    """Leased messages now."""
    leases: int
    threads: int
    """Threads of graphs, and runs without a checkpointer, that lease something or are running now."""
    kv_bytes: int
    """Bytes of KV in use now, in the pool, ..."""
    host_bytes: int
    """... on the host, ..."""
    disk_bytes: int
    """... and on disk."""
    kv_budget_bytes: int
    """Budget of the engine, shared by all tenants."""

    @property
    def rows_per_step(self) -> float:
        """Mean requests served by one forward pass."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def rows_per_decode_step(self) -> float:
        return self.decode_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def unfinished_per_decode_step(self) -> float:
        """Mean requests submitted and unfinished at a decode step: the upper bound of `rows_per_decode_step`."""
        return self.decode_unfinished / self.decode_steps if self.decode_steps else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self._items())

    def _repr_html_(self) -> str:
        return table_html("what the engine has done, and holds", ("", ""), self._items())

    def _items(self) -> list[tuple[str, Any]]:
        return [(name.replace("_", " "), value) for name, value in asdict(self).items() if value not in (0, "")]


@dataclass(frozen=True)
class LeasedMemory:
    """Leased messages of one author or tenant."""

    messages: int = 0
    leases: int = 0
    tokens: Mapping[TierName, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens by the fastest tier that has them."""
    pinned_tokens: int = 0


@dataclass(kw_only=True)
class MemoryMap(TierCounters):
    """Snapshot of the memory of one tenant or of all. Bytes are of KV; a message may be in more than one tier."""

    bytes_per_token: int
    tiers: Mapping[TierName, int]
    """Bytes in each tier, also of messages that are not leased any more but still cached or read."""
    budgets: Mapping[TierName, int]
    """Most bytes in each tier; 0 for a tier that is not configured."""
    authors: Mapping[str, LeasedMemory]
    """Leased messages by author, `""` for messages without one."""
    hit_rate: float
    """Share of the tokens that calls read or submitted that were found encoded."""

    def as_object(self) -> dict[str, Any]:
        """Return the snapshot as plain JSON."""
        return asdict(self)

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
        """Return title, columns and rows of two tables: memory by tier, and tokens by author."""
        tiers: list[tuple[Any, ...]] = [
            (tier, size, size // self.bytes_per_token, self.budgets[tier] or None) for tier, size in self.tiers.items()
        ]
        authors: list[tuple[Any, ...]] = [
            (
                author or "nobody named",
                own.messages,
                own.leases,
                *(own.tokens[tier] for tier in TIERS),
                own.pinned_tokens,
            )
            for author, own in self.authors.items()
        ]
        columns = ("author", "messages", "leases", *TIERS, "pinned")
        return [
            ("KV memory by tier", ("tier", "bytes", "tokens", "budget, bytes"), tiers),
            ("Tokens by author, and the fastest tier that has them", columns, authors),
        ]

    def _repr_html_(self) -> str:
        return "".join(table_html(*table) for table in self.tables())


def leased_memory(
    core: EngineCore, messages: Iterable[Message], owner_of: Callable[[Message], str]
) -> dict[str, LeasedMemory]:
    """Return what messages lease, by owner, the largest first.

    Args:
        core: Core that has them.
        messages: Leased messages.
        owner_of: Returns a message's owner.
    """
    counts: dict[str, Counter[str]] = {}
    for message in messages:
        own, tokens, entry = counts.setdefault(owner_of(message), Counter()), len(message.tokens), message.entry
        own.update(messages=1, leases=message.leases, pinned=tokens * (entry is not None and entry.pins > 0))
        own[tier_of(core, message)] += tokens
    leased = {
        owner: LeasedMemory(own["messages"], own["leases"], {tier: own[tier] for tier in TIERS}, own["pinned"])
        for owner, own in counts.items()
    }
    return dict(sorted(leased.items(), key=lambda item: (-sum(item[1].tokens.values()), item[0])))


def tier_of(core: EngineCore, message: Message) -> TierName:
    """Return the fastest tier that has a message's KV."""
    entry, memory = message.entry, core.cache
    if core.execution.holds(message.handle.id):
        return "device"
    if entry is not None and not memory.lost(entry) and memory.in_memory(entry):
        return "host" if entry.segment is None else "device"
    has_file = entry is not None and entry.on_disk
    return "disk" if has_file or memory.files.is_persisted(message.handle.id, message.tenant) else "lineage"


def stats_of(core: EngineCore, tenant: str | None = None) -> EngineStats:
    """Return the totals and current usage of a tenant, or of all tenants."""
    with core.lock:
        messages, leases = core.table.counts(tenant)
        # Numbers that would reveal other tenants' work are hidden from a tenant.
        of_all: dict[str, int] = {} if tenant is None else {"graphs": 0, "steps_ahead": 0}
        return EngineStats(
            **asdict(core.counters.so_far(tenant)),
            unfinished=core.loop.unfinished() if tenant is None else len(core.loop.requests_of(tenant)),
            messages=messages,
            leases=leases,
            threads=core.thread_leases.names(tenant),
            **asdict(core.tier_counters.so_far(tenant)),
            **core.execution.bytes_by_tier(core.cache, tenant),
            kv_budget_bytes=core.kv_budget_bytes,
            **(asdict(core.execution.computing()) | of_all),
        )


def memory_map_of(core: EngineCore, tenant: str | None = None) -> MemoryMap:
    """Return how much of a tenant's KV, or of all, is in each tier, and which authors keep it there."""
    with core.lock:
        budgets, stats = core.settings.memory, stats_of(core, tenant)
        disk_bytes = 0 if budgets.disk is None else budgets.disk_bytes
        requested = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
        return MemoryMap(
            bytes_per_token=core.pool.geometry.bytes_per_token,
            tiers={"device": stats.kv_bytes, "host": stats.host_bytes, "disk": stats.disk_bytes},
            budgets={"device": core.kv_budget_bytes, "host": budgets.host_bytes, "disk": disk_bytes},
            authors=leased_memory(core, core.table.messages(tenant), lambda message: message.author or ""),
            hit_rate=stats.tokens_reused / requested if requested else 0.0,
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
            entries = core.cache.entries_of(None)
            assert all(entry in leased or entry.wanted for entry in entries), "KV outlived its message"
            owned = sum(entry.segment is not None for entry in entries)
            assert core.pool.live_segments() == owned, "a segment outlived its message"
