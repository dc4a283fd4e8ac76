"""Eviction policy of the pool, the host tier and files: least recently used first, never what is pinned."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def leaving(longest_unused_first: Iterable[tuple[Key, int]], over: int) -> Iterator[Key]:
    """Yield keys to evict until `over` is freed, or none is left.

    Args:
        longest_unused_first: Keys that may be evicted, with their sizes; without pinned ones.
        over: Amount beyond the budget, in the unit of the sizes.
    """
    for key, nbytes in longest_unused_first:
        if over <= 0:
            return
        over -= nbytes
        yield key
