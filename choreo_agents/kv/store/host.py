"""The host memory in which KV waits that has left the pool."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from choreo_agents.kv.store.eviction import LongestUnused
from choreo_agents.kv.tiers import HostKV

Key = TypeVar("Key", bound=Hashable)


class HostTier(Generic[Key]):
    """KV in host memory, within a budget.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._order: LongestUnused[Key] = LongestUnused()
        self._kept: dict[Key, HostKV] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def bytes_of(self, key: Key) -> int:
        """What it takes here."""
        return self._kept[key].nbytes if key in self._kept else 0

    @property
    def free_bytes(self) -> int:
        """That may come before anything has to leave."""
        return self.budget_bytes - self._order.used_bytes

    def put(self, key: Key, kv: HostKV) -> list[tuple[Key, HostKV]]:
        """Keep KV; what leaves for it, oldest first: itself if it is larger than the budget."""
        self._order.add(key, kv.nbytes)
        self._kept[key] = kv
        left: list[tuple[Key, HostKV]] = []
        for each in self._order.leaving(self.budget_bytes):
            leaving = self.take(each)
            assert leaving is not None
            left.append((each, leaving))
        return left

    def peek(self, key: Key) -> HostKV | None:
        """KV that stays here."""
        return self._kept.get(key)

    def take(self, key: Key) -> HostKV | None:
        """Hand KV out and forget it."""
        self._order.remove(key)
        return self._kept.pop(key, None)

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert self._order.used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes
