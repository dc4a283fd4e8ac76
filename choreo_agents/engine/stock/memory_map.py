"""Who keeps how much memory, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import TIERS, TierName
from choreo_agents.tracing import table_html


@dataclass(frozen=True)
class LeasedMemory:
    """The leased messages of one author, or of one tenant."""

    messages: int = 0
    leases: int = 0
    tokens: Mapping[TierName, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens by the fastest tier that has them."""
    pinned_tokens: int = 0


@dataclass(frozen=True)
class MemoryMap:
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
    evicted: int
    restored_from_host: int
    restored_from_disk: int
    lost: int
    recomputed: int
    adopted: int
    sent_bytes: int
    received_bytes: int

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
