"""The KV of one message: which tiers have it, and what keeps it there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store.key import TierKey
from choreo_agents.kv.tiers import HostKV

TierName = Literal["device", "host", "disk", "lineage"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk", "lineage")
"""Tiers, fastest first. `lineage` takes no memory: the message is computed again when it is read."""


_COUNTED = frozenset({"segment", "pins", "staged", "hosted_bytes", "on_disk"})
"""Fields on which an entry's tier, and whether it may leave the pool, depend."""


@dataclass(eq=False)
class CacheEntry:
    """The KV of one message, in whichever tiers have it.

    device   segment         read and written by steps
    host     staged          on its way to or from the disk; or in the host tier (`HostedEntries`)
    disk     on_disk         a file named by the message's id
    kept     kept            a file that outlives the engine
    lost     none of them    lineage says how to compute it again
    """

    key: str
    """Id of the message."""
    tokens: int
    native_offset: int
    """Position at which its first token was encoded, and will be if it is computed again."""
    segment: Segment | None = None
    staged: HostKV | None = None
    """KV on the host outside the host tier's budget, while a request waits to read it or the disk to write it."""
    on_disk: bool = False
    kept: bool = False
    """Whether a file outlives the engine, as far as is known; while true, the message is not computed again."""
    writing: Future[list[str]] | None = None
    """The write to disk that is under way; `staged` until it is done."""
    fetching: Future[tuple[HostKV, int] | None] | None = None
    """The read from disk that is under way."""
    arriving: Arrival | None = None
    """The last copy into the pool, which may still be under way."""
    wanted: int = 0
    """Number of requests that wait to read it: it may leave the pool, but stays on the host at least."""
    pins: int = 0
    """Number of pins; while there are any, it stays in the pool."""
    tenant: str = ""
    """Tenant that owns it."""
    hosted_bytes: int = 0
    """Bytes of it in the host tier."""
    changed: Callable[[CacheEntry], None] | None = field(default=None, repr=False)
    """Callback of the `KVBooks` that count it; None while it is not counted."""
    idle_tokens: int = 0
    """Tokens that evicting it would free in the pool; 0 while it may not leave."""
    below: tuple[int, int] = (0, 0)
    """As counted below the pool: bytes on the host, and tokens on disk."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Every assignment keeps the totals right, so that reading them needs no scan of entries.
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if name in _COUNTED and self.__dict__.get("changed") is not None:
            if name == "segment":
                self.update_holder(before)
            self.recount()

    def update_holder(self, before: Segment | None = None) -> None:
        """Make its segment point to it, and the segment that it had before no more."""
        for segment, holder in ((before, None), (self.segment, self if self.changed is not None else None)):
            if segment is not None and segment.holder in (None, self):
                segment.holder = holder

    def recount(self) -> None:
        """Update the totals after a change of it or its segment."""
        if self.changed is not None:
            self.changed(self)

    @property
    def filed(self) -> bool:
        """True if a file holds its KV."""
        return self.on_disk or self.kept

    @property
    def file(self) -> TierKey:
        """Key of its file."""
        return TierKey(self.key, self.tokens, self.native_offset)

    def idle(self) -> bool:
        """Return whether it is in the pool and may be evicted: nothing else pins it."""
        return self.segment is not None and self.segment.pins == 1 and not self.pins

    def withdraw(self, pool: KVPool, arrival: Arrival) -> None:
        """Undo a copy into the pool that failed."""
        arrival.end(is_there=False)
        self.segment, self.staged, self.arriving = None, arrival.kv, None
        pool.unpin(arrival.segment)
