"""The KV of one message: which tiers have it, and what keeps it there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV

TierName = Literal["device", "host", "disk", "lineage"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk", "lineage")
"""Tiers, fastest first. `lineage` takes no memory: the message is computed again when it is read."""


@dataclass(eq=False)
class CacheEntry:
    """The KV of one message, in whichever tiers have it.

    device   segment         read and written by steps
    host     staged          on its way to or from the disk; or in the host tier (`HostedEntries`)
    disk     on_disk         in the engine's spill file
    disk     persisted       a file that outlives the engine
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
    persisted: bool = False
    """Whether a file outlives the engine, as far as is known; while true, the message is not computed again."""
    writing: Future[bytes] | None = None
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

    @property
    def has_file(self) -> bool:
        """True if a file holds its KV."""
        return self.on_disk or self.persisted

    @property
    def idle_tokens(self) -> int:
        """Tokens that evicting it frees in the pool; 0 if it is not there, or may not leave."""
        return 0 if self.segment is None else self.segment.idle_tokens
