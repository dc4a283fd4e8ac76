"""The method of calls whose parents' KV is remote: the router wants the messages, and pins nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from choreo_agents.engine.delegation import Binding, CacheEntry, Lineage, MessageTable, Request, Segment


class RemoteMethod:
    """The method `choreo`, over a cache that remote engines hold.

    Args:
        table: The router's table of messages.
        closed: Called with each tenant that has ended, after all its messages were dropped.
    """

    keeps_kv = True

    def __init__(self, table: MessageTable, closed: Callable[[str], None]) -> None:
        self._table = table
        self.drop_tenant = closed

    def encoding(self, lineage: Lineage) -> RemoteEncoding:
        return RemoteEncoding(lineage, self._table)

    def reach(self, lineage: Lineage, added: int) -> int:
        return lineage.placement.end([len(parent.tokens) for parent in lineage.parents], len(lineage.tokens) + added)

    def room(self, lineage: Lineage, added: int) -> int:
        rounded = self._table.cache.pool.rounded
        parents = {parent.handle.id: len(parent.tokens) for parent in lineage.parents}
        return sum(map(rounded, (*parents.values(), len(lineage.tokens) + added)))

    def evictable_tokens(self) -> int:
        return 0

    def evict(self, tokens: int) -> None: ...

    def pinned(self, tenant: str) -> str:
        return ""

    def check(self) -> None:
        self._table.cache.check()


class RemoteEncoding:
    """A request over messages whose KV is remote. Wants them from the call on: releasing a handle harms nothing."""

    def __init__(self, lineage: Lineage, table: MessageTable) -> None:
        self.lineage, self._table = lineage, table
        for parent in lineage.parents:
            table.want(parent)
        self._closed = False

    def first(self, reader: Request) -> Sequence[Request]:
        return ()

    def awaits(self) -> Sequence[Request]:
        return ()

    def ready(self) -> bool:
        return True

    def after(self) -> Sequence[Request]:
        return ()

    def claimed_tokens(self, counted: set[object]) -> int:
        return 0

    def reads(self) -> Collection[CacheEntry]:
        return ()

    def prompt_tokens(self) -> int:
        return len(self.lineage.tokens)

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        return 0, len(self.lineage.tokens)

    def pinned_tokens(self) -> int:
        return 0

    def bind(self) -> Binding:
        return Binding((), self.lineage.tokens, self.lineage.placement.position)

    def bound(self, segment: Segment) -> None: ...

    def unpin(self) -> None: ...

    def close(self, request: Request) -> None:
        if self._closed:
            return
        self._closed = True
        for parent in self.lineage.parents:
            self._table.unwant(parent)
