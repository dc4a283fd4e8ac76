"""Physical KV: the slots that consecutive tokens occupy, and the pieces of them that a view is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.blocks import Run


class Holder(Protocol):
    """Owner of a segment's message."""

    pins: int
    """Number of pins; while there are any, the segment stays in the pool."""


@dataclass(eq=False)
class Segment:
    """The KV of consecutive tokens, encoded from position `native_offset` on.

        tokens     0 . . . . . encoded . . . capacity
        slots      |---- runs[0] ----|--- runs[1] ---|

    Keys stay as they were encoded; `encoded` only grows, up to `capacity`. `pins` counts the owners: a message, a
    prefix-tree node, each request that reads it. The last unpin frees the slots and empties `runs`, so that freed
    memory cannot be read.
    """

    runs: tuple[Run, ...]
    native_offset: int
    encoded: int = 0
    pins: int = 0
    tenant: str = ""
    """Tenant; rows of other tenants never read it."""
    capacity: int = field(init=False)
    holder: Holder | None = field(default=None, repr=False)
    """The message whose KV it holds, if any."""
    idle_tokens: int = 0
    """Tokens that evicting it frees; 0 while it is no message's, or may not leave. Kept by the pool."""

    def __post_init__(self) -> None:
        self.hold(self.runs)

    def hold(self, runs: tuple[Run, ...]) -> None:
        """Set its slots."""
        self.runs, self.capacity = runs, sum(run.length for run in runs)

    def slots(self, first: int, count: int) -> list[Run]:
        """Return the runs of slots that hold tokens `first` to `first + count`.

        Raises:
            KVMemoryError: It has no such slots; they may have been freed.
        """
        if first < 0 or first + count > self.capacity:
            raise KVMemoryError(f"tokens {first} to {first + count} of a segment of {self.capacity} were asked for")
        runs: list[Run] = []
        passed = 0
        for run in self.runs:
            low, high = max(first, passed), min(first + count, passed + run.length)
            if low < high:
                runs.append(Run(run.start + low - passed, high - low))
            passed += run.length
        return runs


@dataclass(frozen=True)
class Piece:
    """Part of a view: tokens `first` to `first + count` of a segment, its token 0 shown at position `offset`."""

    segment: Segment
    first: int
    count: int
    offset: int

    @property
    def shift(self) -> int:
        """Positions by which the view moves the segment from where it was encoded."""
        return self.offset - self.segment.native_offset
