"""The host memory in which KV waits that has left the pool."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from choreo_agents.kv.store.eviction import leaving
from choreo_agents.kv.tiers import HostKV

Key = TypeVar("Key", bound=Hashable)


class HostTier(Generic[Key]):
    """KV in host memory, within a budget.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._kept: dict[Key, HostKV] = {}
        """The longest unused first: what is used leaves, and comes again."""

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def bytes_of(self, key: Key) -> int:
        """What it takes here."""
        return self._kept[key].nbytes if key in self._kept else 0

    @property
    def free_bytes(self) -> int:
        """That may come before anything has to leave."""
        return self.budget_bytes - self._used_bytes

    def put(self, key: Key, kv: HostKV) -> list[tuple[Key, HostKV]]:
        """Keep KV; what leaves for it, oldest first: itself if it is larger than the budget."""
        assert key not in self._kept
        self._kept[key] = kv
        self._used_bytes += kv.nbytes
        over = list(leaving(((each, held.nbytes) for each, held in self._kept.items()), -self.free_bytes))
        return [(each, held) for each in over if (held := self.take(each)) is not None]

    def peek(self, key: Key) -> HostKV | None:
        """KV that stays here."""
        return self._kept.get(key)

    def take(self, key: Key) -> HostKV | None:
        """Hand KV out and forget it."""
        kv = self._kept.pop(key, None)
        self._used_bytes -= 0 if kv is None else kv.nbytes
        return kv

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert self._used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes
