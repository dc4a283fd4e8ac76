"""What leased messages hold, by tenant and by author: counted as they come, go and move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.entry import TierName


@dataclass
class Tally:
    """Of some leased messages."""

    messages: int = 0
    leases: int = 0
    tokens: Counter[TierName] = field(default_factory=Counter)
    """By the fastest tier that has them."""
    pinned_tokens: int = 0

    def add(self, counts: _Counts, sign: int) -> None:
        self.messages += sign
        self.leases += sign * counts.leases
        self.tokens[counts.tier] += sign * counts.tokens
        self.pinned_tokens += sign * counts.tokens * counts.is_pinned


class _Counts(NamedTuple):
    """What one message counts for."""

    author: str
    leases: int
    tokens: int
    tier: TierName
    is_pinned: bool


class HeldMessages:
    """Of one table. Used under the engine's lock only."""

    def __init__(self) -> None:
        self._counted: dict[Message, _Counts] = {}
        self._tenants: dict[str, Tally] = {}
        self._authors: dict[str, dict[str, Tally]] = {}
        self._nowhere: dict[str, dict[Message, None]] = {}
        """What no tier of this engine has, by tenant."""

    def count(self, message: Message) -> None:
        """Something of a message may not be as it was."""
        before, now = self._counted.get(message), _of(message)
        if before == now:
            return
        if before is not None:
            self._add(message, before, -1)
        if now is not None:
            self._counted[message] = now
            self._add(message, now, 1)
        else:
            del self._counted[message]

    def of(self, tenant: str | None) -> Tally:
        """Of one tenant, or of all."""
        if tenant is not None:
            return self._tenants.get(tenant, Tally())
        whole = Tally()
        for tally in self._tenants.values():
            whole.messages += tally.messages
            whole.leases += tally.leases
        return whole

    def by_author(self, tenant: str | None) -> dict[str, list[Tally]]:
        """Of one tenant's authors, or of those of all: of each one tally for each tenant."""
        found: dict[str, list[Tally]] = {}
        for name in self._authors if tenant is None else [tenant]:
            for author, tally in self._authors.get(name, {}).items():
                found.setdefault(author, []).append(tally)
        return found

    def by_tenant(self) -> Mapping[str, Tally]:
        return self._tenants

    def nowhere(self, tenants: Iterable[str]) -> list[Message]:
        """What no tier of this engine has, of some tenants."""
        return [message for tenant in tenants for message in self._nowhere.get(tenant, ())]

    def tenants(self) -> Iterable[str]:
        """Who holds anything."""
        return self._tenants

    def check(self, leased: Iterable[Message]) -> None:
        """Assert that all leased messages are counted, as they are."""
        assert self._counted == {message: _of(message) for message in leased}
        expected = HeldMessages()
        for message in self._counted:
            expected.count(message)
        assert self._tenants == expected._tenants and self._authors == expected._authors
        assert {name: {*held} for name, held in self._nowhere.items()} == {
            name: {*held} for name, held in expected._nowhere.items()
        }

    def _add(self, message: Message, counts: _Counts, sign: int) -> None:
        tenant = message.tenant
        authors = self._authors.setdefault(tenant, {})
        for tallies, key in ((self._tenants, tenant), (authors, counts.author)):
            tally = tallies.setdefault(key, Tally())
            tally.add(counts, sign)
            if not tally.messages:
                del tallies[key]
        if not authors:
            del self._authors[tenant]
        if counts.tier == "lineage":
            held = self._nowhere.setdefault(tenant, {})
            if sign > 0:
                held[message] = None
            else:
                del held[message]
            if not held:
                del self._nowhere[tenant]


def _of(message: Message) -> _Counts | None:
    """What it counts for; nothing unless it is leased."""
    if not message.leases:
        return None
    entry = message.entry
    tier: TierName = "lineage" if entry is None else entry.counted.tier
    return _Counts(
        message.author or "", message.leases, len(message.tokens), tier, entry is not None and entry.counted.is_pinned
    )
