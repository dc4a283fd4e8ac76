"""Hands out blocks of the pool, in as few contiguous runs as it can."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from choreo_agents.errors import KVMemoryError


@dataclass(frozen=True)
class Run:
    """`length` consecutive units from `start` on."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class BlockAllocator:
    """A free list of runs, sorted by start and never adjacent to each other.

        blocks   0 1 2 3 4 5 6 7 8 9
        owner    a a . . b . . . a .      free: (2,2) (5,3) (9,1)

    Not thread-safe: one thread owns the pool.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = [Run(0, blocks)] if blocks else []

    @property
    def free_blocks(self) -> int:
        return sum(run.length for run in self._free)

    def allocate(self, count: int) -> tuple[Run, ...] | None:
        """Take `count` blocks: from the tightest free run that is long enough, else from the longest ones.

        None if too few are free.
        """
        if count < 1:
            raise KVMemoryError(f"{count} blocks of KV memory were asked for")
        fitting = [run for run in self._free if run.length >= count]
        if fitting:
            return (self._take(min(fitting, key=lambda run: run.length), count),)
        if self.free_blocks < count:
            return None
        taken: list[Run] = []
        for run in sorted(self._free, key=lambda run: -run.length):
            taken.append(self._take(run, min(run.length, count)))
            count -= taken[-1].length
            if not count:
                break
        return tuple(taken)

    def free(self, run: Run) -> None:
        """Give a run back, joined with its free neighbours."""
        at = bisect_left(self._free, run.start, key=lambda free: free.start)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before is not None and before.end > run.start) or (after is not None and run.end > after.start):
            raise KVMemoryError(f"{run} was freed twice")
        start, end = run.start, run.end
        if before is not None and before.end == start:
            start, at = before.start, at - 1
            del self._free[at]
        if after is not None and after.start == end:
            end = after.end
            del self._free[at]
        self._free.insert(at, Run(start, end - start))

    def check(self) -> None:
        """Assert that the free list is sorted, joined and inside the pool."""
        for run in self._free:
            assert run.length > 0 and run.start >= 0 and run.end <= self.blocks, f"{run} is outside the pool"
        for left, right in zip(self._free, self._free[1:], strict=False):
            assert left.end < right.start, f"free runs {left} and {right} overlap or were not joined"

    def free_runs(self) -> tuple[Run, ...]:
        return tuple(self._free)

    def _take(self, run: Run, count: int) -> Run:
        at = self._free.index(run)
        if run.length == count:
            del self._free[at]
        else:
            self._free[at] = Run(run.start + count, run.length - count)
        return Run(run.start, count)
