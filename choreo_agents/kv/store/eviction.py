"""Who leaves when there is more than a budget: the longest unused first, and never what is pinned.

The one policy of all that keeps KV: the pool, the host and files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def leaving(longest_unused_first: Iterable[tuple[Key, int]], over: int) -> Iterator[Key]:
    """What leaves until so many bytes less are kept, or nothing is left that may.

    Args:
        longest_unused_first: What may leave, and its bytes; what is pinned is not among it.
        over: Bytes that are kept beyond the budget.
    """
    for key, nbytes in longest_unused_first:
        if over <= 0:
            return
        over -= nbytes
        yield key
