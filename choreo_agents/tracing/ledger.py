"""Counts of all tenants together, and of each its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

Counts = TypeVar("Counts")


class Ledger(Generic[Counts]):
    """Counts of what all tenants did, for whom the engine belongs to, and of what each did itself, for that.

    Args:
        make: Makes counts that have counted nothing. Their fields are numbers.
    """

    def __init__(self, make: Callable[[], Counts]) -> None:
        self._make = make
        self.total = make()
        """Of all."""
        self._own: defaultdict[str, Counts] = defaultdict(make)

    def so_far(self, tenant: str | None) -> Counts:
        """Return the counts of one tenant, or of all, to read: nothing is kept of a tenant that has left."""
        return self.total if tenant is None else self._own.get(tenant) or self._make()

    def of(self, tenant: str) -> tuple[Counts, Counts]:
        """Return where to count what a tenant does: for all, and its own."""
        return self.total, self._own[tenant]

    def add(self, tenant: str, count: str, amount: int = 1) -> None:
        """Add to a count of a tenant's."""
        for counts in self.of(tenant):
            setattr(counts, count, getattr(counts, count) + amount)

    def drop_tenant(self, tenant: str) -> None:
        """Forget a tenant that has left: what it did stays in the total."""
        self._own.pop(tenant, None)
