"""Who leaves when there is more than a budget: the longest unused first, and never what is pinned.

The one policy of all that keeps KV: the pool, the host, files, and a shelf of encoded texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

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


@dataclass
class _Kept:
    nbytes: int
    pins: int = 0


class LongestUnused(Generic[Key]):
    """Knows what is kept, in the order in which it was last used, and how often each is pinned. Not thread-safe."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def add(self, key: Key, nbytes: int) -> None:
        """Keep something, used just now."""
        assert key not in self._kept
        self._kept[key] = _Kept(nbytes)
        self.used_bytes += nbytes

    def use(self, key: Key) -> None:
        """It was used just now."""
        self._kept.move_to_end(key)

    def remove(self, key: Key) -> None:
        """It is not kept any more; nothing happens if it was not."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.used_bytes -= kept.nbytes

    def pin(self, key: Key) -> None:
        """Let it never leave, until it was unpinned as often."""
        self._kept[key].pins += 1

    def unpin(self, key: Key) -> None:
        """Undo one `pin`."""
        assert self._kept[key].pins > 0
        self._kept[key].pins -= 1

    def is_pinned(self, key: Key) -> bool:
        return self._kept[key].pins > 0

    def leaving(self, most: int, among: Container[Key] | None = None) -> list[Key]:
        """What has to leave so that no more bytes than these are kept; it is not removed.

        Args:
            most: The budget.
            among: What the budget is of; None: all.
        """
        there = [(key, kept) for key, kept in self._kept.items() if key in among] if among is not None else None
        used = self.used_bytes if there is None else sum(kept.nbytes for _, kept in there)
        free = ((key, kept.nbytes) for key, kept in (self._kept.items() if there is None else there) if not kept.pins)
        return list(leaving(free, used - most))
