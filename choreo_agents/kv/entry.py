"""The KV of one message, wherever it is."""

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
"""From the fastest on; what is only lineage takes no memory and is computed again when it is read."""


_COUNTED = frozenset({"segment", "pins", "staged", "hosted_bytes", "on_disk"})
"""Where an entry is, and whether it may leave the pool, depends on these."""


@dataclass(eq=False)
class CacheEntry:
    """The KV of one message, wherever it is.

    device   segment         read and written by steps
    host     kv          in the host tier, or staged on its way to or from the disk
    disk     on_disk         a file named by the message's id
    kept     kept            a file that outlives the engine, and is all that there is of it
    lost     none of them    lineage says how to compute it again
    """

    key: str
    """The message's id."""
    tokens: int
    native_offset: int
    """The position that its first token was encoded at: what computes it again encodes it there."""
    segment: Segment | None = None
    staged: HostKV | None = None
    """On the host, whatever the host tier's budget, for as long as a request waits for it or the disk does."""
    on_disk: bool = False
    kept: bool = False
    """As far as is known: for as long as it is true, nobody computes it again."""
    writing: Future[list[str]] | None = None
    """Under way to the disk; staged until it is there."""
    fetching: Future[tuple[HostKV, int] | None] | None = None
    """Under way from the disk."""
    arriving: Arrival | None = None
    """Of the step that brought it into the pool last, and may be at it still."""
    wanted: int = 0
    """Requests that wait to read it: it may leave the pool, but is kept on the host at least."""
    pins: int = 0
    """How often it was pinned: it stays in the pool."""
    tenant: str = ""
    """Whose it is."""
    hosted_bytes: int = 0
    """That the host tier has of it."""
    changed: Callable[[CacheEntry], None] | None = field(default=None, repr=False)
    """Told of whatever changes what it counts for, while it is counted."""
    idle_tokens: int = 0
    """Room in the pool that would be free without it; 0 while anything keeps it there."""
    below: tuple[int, int] = (0, 0)
    """What it counts for below the pool: bytes on the host, and tokens on disk."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if name in _COUNTED and self.__dict__.get("changed") is not None:
            if name == "segment":
                self.hold_on_to(before)
            self.recount()

    def hold_on_to(self, before: Segment | None = None) -> None:
        """Its segment is to know whose KV it holds, and the one that it had before not to any more."""
        for segment, holder in ((before, None), (self.segment, self if self.changed is not None else None)):
            if segment is not None and segment.holder in (None, self):
                segment.holder = holder

    def recount(self) -> None:
        """Something of it, or of its segment, is not as it was."""
        if self.changed is not None:
            self.changed(self)

    @property
    def filed(self) -> bool:
        """Whether a file has it."""
        return self.on_disk or self.kept

    @property
    def file(self) -> TierKey:
        """What its file is asked for by."""
        return TierKey(self.key, self.tokens, self.native_offset)

    def idle(self) -> bool:
        """Whether it is in the pool and nothing keeps it there."""
        return self.segment is not None and self.segment.pins == 1 and not self.pins

    def withdraw(self, pool: KVPool, arrival: Arrival) -> None:
        """It did not arrive: it is again where it was."""
        arrival.end(is_there=False)
        self.segment, self.staged, self.arriving = None, arrival.kv, None
        pool.unpin(arrival.segment)
