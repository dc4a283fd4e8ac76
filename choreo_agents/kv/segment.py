"""Physical KV: which slots a stretch of tokens occupies, and a view's pieces of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.blocks import Run


class Holder(Protocol):
    """What is kept in a segment: it counts for something, which depends on who else pins that."""

    def recount(self) -> None: ...


@dataclass(eq=False)
class Segment:
    """The KV of consecutive tokens, encoded from position `native_offset` on.

        tokens     0 . . . . . encoded . . . capacity
        slots      |---- runs[0] ----|--- runs[1] ---|

    Keys stay as they were encoded; `encoded` only grows, up to `capacity`. `pins` counts the owners: a message, a
    prefix-tree node, each request that reads it. The last unpin gives the slots back, and leaves it none: what was
    freed cannot be read.
    """

    runs: tuple[Run, ...]
    native_offset: int
    encoded: int = 0
    pins: int = 0
    tenant: str = ""
    """Whose it is: no other's rows read it."""
    capacity: int = field(init=False)
    holder: Holder | None = field(default=None, repr=False)
    """The message that is kept in it, if one is."""

    def __post_init__(self) -> None:
        self.hold(self.runs)

    def hold(self, runs: tuple[Run, ...]) -> None:
        """Have these slots from now on."""
        self.runs, self.capacity = runs, sum(run.length for run in runs)

    def slots(self, first: int, count: int) -> list[Run]:
        """The runs of slots that hold tokens `first` to `first + count`.

        Raises:
            KVMemoryError: It has no such slots any more.
        """
        if first < 0 or first + count > self.capacity:
            raise KVMemoryError(
                f"tokens {first} to {first + count} of a segment that has {self.capacity} were asked for"
            )
        found: list[Run] = []
        passed = 0
        for run in self.runs:
            low, high = max(first, passed), min(first + count, passed + run.length)
            if low < high:
                found.append(Run(run.start + low - passed, high - low))
            passed += run.length
        return found


@dataclass(frozen=True)
class Piece:
    """Part of a view: tokens `first` to `first + count` of a segment, its token 0 shown at position `offset`."""

    segment: Segment
    first: int
    count: int
    offset: int

    @property
    def shift(self) -> int:
        """How far the view moves the segment from where it was encoded."""
        return self.offset - self.segment.native_offset
