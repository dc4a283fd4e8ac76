"""Who keeps how much memory, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.cache import KVCache

TierName = Literal["device", "host", "disk", "lineage"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk", "lineage")
"""From the fastest on; what is only lineage takes no memory and is computed again when it is read."""


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


def leased_memory(
    messages: Iterable[Message], whose: Callable[[Message], str], memory: KVCache
) -> dict[str, LeasedMemory]:
    """What messages keep, by whose they are, the largest first."""
    by_owner: dict[str, list[Message]] = {}
    for message in messages:
        by_owner.setdefault(whose(message), []).append(message)
    made: dict[str, LeasedMemory] = {}
    for owner, theirs in by_owner.items():
        tokens: dict[TierName, int] = dict.fromkeys(TIERS, 0)
        for message in theirs:
            tokens[tier_of(message, memory)] += len(message.tokens)
        pinned = sum(len(m.tokens) for m in theirs if m.entry is not None and m.entry.pins)
        made[owner] = LeasedMemory(len(theirs), sum(message.leases for message in theirs), tokens, pinned)
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
