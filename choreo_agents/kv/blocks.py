"""Allocator of the pool's blocks, in as few contiguous runs as possible."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import NamedTuple

from choreo_agents.errors import KVMemoryError


class Run(NamedTuple):
    """`length` consecutive units from `start` on."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class BlockAllocator:
    """Free runs of blocks, sorted by start and by length. No two free runs are adjacent.

        blocks   0 1 2 3 4 5 6 7 8 9
        owner    a a . . b . . . a .      free: (2,2) (5,3) (9,1)

    Not thread-safe: one thread owns the pool.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free_blocks = 0
        self._free: list[Run] = []
        """Free runs by start, ascending."""
        self._sizes: list[tuple[int, int]] = []
        """Length and start of the free runs, ascending."""
        if blocks:
            self._add(Run(0, blocks))

    def allocate(self, count: int) -> tuple[Run, ...] | None:
        """Take `count` blocks from the shortest free run that is long enough, else from the longest ones.

        Returns None if too few are free.
        """
        if count < 1:
            raise KVMemoryError(f"{count} blocks of KV memory were asked for")
        if self.free_blocks < count:
            return None
        at = bisect_left(self._sizes, (count, 0))
        if at < len(self._sizes):
            return (self._take(at, count),)
        taken: list[Run] = []
        while count:
            longest = self._sizes[-1][0]
            taken.append(self._take(bisect_left(self._sizes, (longest, 0)), min(longest, count)))
            count -= taken[-1].length
        return tuple(taken)

    def free(self, run: Run) -> None:
        """Free a run, and join it with its free neighbours."""
        at = bisect_left(self._free, run)
        around = self._free[max(0, at - 1) : at + 1]
        if any(free.start < run.end and run.start < free.end for free in around):
            raise KVMemoryError(f"{run} was freed twice")
        for free in around:
            if run.start == free.end or free.start == run.end:
                self._remove(free)
                run = Run(min(run.start, free.start), run.length + free.length)
        self._add(run)

    def check(self) -> None:
        """Assert that the free runs are sorted, joined, counted and inside the pool."""
        runs = self.free_runs()
        for run in runs:
            assert run.length > 0 and run.start >= 0 and run.end <= self.blocks, f"{run} is outside the pool"
        for lower, upper in pairwise(runs):
            assert lower.end < upper.start, f"free runs {lower} and {upper} overlap or were not joined"
        assert self._sizes == sorted((run.length, run.start) for run in runs)
        assert self.free_blocks == sum(run.length for run in runs)

    def free_runs(self) -> tuple[Run, ...]:
        return tuple(self._free)

    def _take(self, at: int, count: int) -> Run:
        """Take blocks from the start of the free run at index `at` of `_sizes`."""
        length, start = self._sizes[at]
        self._remove(Run(start, length))
        if length > count:
            self._add(Run(start + count, length - count))
        return Run(start, count)

    def _add(self, run: Run) -> None:
        insort(self._free, run)
        insort(self._sizes, (run.length, run.start))
        self.free_blocks += run.length

    def _remove(self, run: Run) -> None:
        del self._free[bisect_left(self._free, run)]
        del self._sizes[bisect_left(self._sizes, (run.length, run.start))]
        self.free_blocks -= run.length
