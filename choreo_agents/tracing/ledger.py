"""Counts of all tenants together, and of each its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Counts = TypeVar("Counts")


class Ledger(Generic[Counts]):
    """What everybody did is told to whom the engine belongs; to a tenant, what it did itself.

    Args:
        make: Makes counts that have counted nothing. Their fields are numbers.
    """

    def __init__(self, make: Callable[[], Counts]) -> None:
        self._make = make
        self.total = make()
        """Of all."""
        self._own: dict[str, Counts] = {}

    def own(self, tenant: str) -> Counts:
        """Of one tenant, since it came."""
        if tenant not in self._own:
            self._own[tenant] = self._make()
        return self._own[tenant]

    def so_far(self, tenant: str) -> Counts:
        """The same to read: nothing is kept of a tenant that has left."""
        return self._own.get(tenant) or self._make()

    def of(self, tenant: str) -> tuple[Counts, Counts]:
        """Where to count what a tenant does."""
        return self.total, self.own(tenant)

    def add(self, tenant: str, count: str, amount: int = 1) -> None:
        """Add to a count of a tenant's."""
        for counts in self.of(tenant):
            setattr(counts, count, getattr(counts, count) + amount)

    def forget(self, tenant: str) -> None:
        """The tenant has left: what it did stays in the total."""
        self._own.pop(tenant, None)
