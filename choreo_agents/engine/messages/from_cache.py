"""Method "choreo": calls attend to their parents' own KV at any position; lost KV is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from choreo_agents.engine.messages.message import Lineage, Message, Usage
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Binding, Encoding, Request


class ChoreoMethod:
    """Method whose calls attend to their parents' own KV."""

    keeps_kv = True

    def __init__(self, recomputer: Recomputer) -> None:
        self._recomputer = recomputer
        self._cache = recomputer.table.cache

    def encoding(self, lineage: Lineage) -> FromCache:
        return FromCache(lineage, self._recomputer)

    def reach(self, lineage: Lineage, added: int) -> int:
        return lineage.placement.end([len(parent.tokens) for parent in lineage.parents], len(lineage.tokens) + added)

    def room(self, lineage: Lineage, added: int) -> int:
        parents = {parent.handle.id: len(parent.tokens) for parent in lineage.parents}
        own = len(lineage.tokens) + added
        return sum(self._cache.pool.rounded(length) for length in (*parents.values(), own))

    def evictable_tokens(self) -> int:
        return self._cache.pool.idle_tokens

    def evict(self, tokens: int) -> None:
        self._cache.evict(tokens)

    def pinned(self, tenant: str) -> str:
        by_author: Counter[str] = Counter()
        for entry in self._cache.entries_of(None):
            if not entry.pins:
                continue
            message = self._recomputer.table.get(entry.key)
            # Other tenants, and the authors of their messages, are not revealed.
            own = message is not None and message.tenant == tenant
            name = "others" if not own else repr(message.author) if message and message.author else "nobody named"
            by_author[name] += entry.tokens
        authors = ", ".join(f"{author} ({tokens} tokens)" for author, tokens in by_author.most_common(5))
        return f" by {authors}" if authors else ""

    def drop_tenant(self, tenant: str) -> None: ...  # the table of messages does it

    def check(self) -> None:
        self._cache.check()


class FromCache(Encoding):
    """Encoding of a request over its parents' KV, wherever that is. It wants the parents' entries from the start, so
    that releasing a handle meanwhile does no harm."""

    def __init__(self, lineage: Lineage, recomputer: Recomputer) -> None:
        self.lineage = lineage
        self.recomputer = recomputer
        self.table, self.cache = recomputer.table, recomputer.table.cache
        self.entries: list[CacheEntry] = []
        with ExitStack() as taken_back:  # all, or none on failure
            for parent in lineage.parents:
                self.entries.append(self.table.want(parent))
                taken_back.callback(self.table.unwant, parent)
            taken_back.pop_all()
        self.different: list[CacheEntry] = list(dict.fromkeys(self.entries))
        self.awaited: dict[str, Future[None]] = {}
        self.pinned: list[Segment] = []
        self.arriving: list[tuple[CacheEntry, Arrival]] = []
        """KV that its first step brings into the pool."""
        self._closed = False

    def first(self, reader: Request) -> list[Request]:
        requests: list[Request] = []
        try:
            for parent, entry in zip(self.lineage.parents, self.entries, strict=True):
                if parent.handle.id not in self.awaited and self.cache.lost(entry):
                    self.awaited[parent.handle.id], request = self.recomputer.recompute(parent, reader)
                    if request is not None:
                        requests.append(request)
        except BaseException:
            for request in requests:  # nobody may wait for a request that will never run
                request.over = True
                request.owner.abandon(request)
            raise
        return requests

    def awaits(self) -> list[Request]:
        running = (self.recomputer.running.get(message_id) for message_id in self.awaited)
        return [request for request in running if request is not None]

    def ready(self) -> bool:
        for message_id, future in list(self.awaited.items()):
            if future.done():
                del self.awaited[message_id]
                future.result()  # raises the error that kept it from being computed
        # All files are requested at once, not one after the other.
        in_memory = [self.cache.fetch(entry) for entry in self.different]
        return all(in_memory)

    def after(self) -> list[Request]:
        under_way = self.awaits()
        fetched = [self.cache.fetch(entry) for entry in self.different if entry.key not in self.awaited]
        return under_way if all(fetched) and len(under_way) == len(self.awaited) else []

    def claimed_tokens(self, counted: set[object]) -> int:
        # What is computed for it has a request of its own, which claims its memory.
        recomputing = {e for e in self.different if e.key in self.awaited and self.cache.lost(e)}
        absent = {e for e in self.different if e.segment is None} - recomputing
        claimed = [e for e in self.different if e not in counted and (e in absent or e.idle_tokens)]
        counted.update(claimed)
        return sum(self.cache.pool.rounded(entry.tokens) for entry in claimed)

    def reads(self) -> list[CacheEntry]:
        return self.different

    def prompt_tokens(self) -> int:
        return len(self.lineage.tokens)

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        self.pinned = [segment for entry in self.different if (segment := self._segment(entry)) is not None]
        for segment in self.pinned:
            self.cache.pool.pin(segment)
        absent = sum(self.cache.pool.rounded(e.tokens) for e in self.different if self._segment(e) is None)
        return absent, len(self.lineage.tokens)

    def pinned_tokens(self) -> int:
        return sum(segment.capacity for segment in self.pinned)

    def bind(self) -> Binding | None:
        arrivals: list[Arrival] = []
        for entry in self.different:
            if self._segment(entry) is None:
                if not self.cache.restore(entry, arrivals):
                    return None
                self.arriving += [(entry, arrival) for arrival in arrivals[len(self.arriving) :]]
                brought = _required(entry.segment, entry)
                self.cache.pool.pin(brought)
                self.pinned.append(brought)
        pieces: list[Piece] = []
        placement = self.lineage.placement
        for entry, offset in zip(self.entries, placement.offsets, strict=True):
            segment = _required(self._segment(entry), entry)
            self.cache.touch(entry)
            pieces.append(Piece(segment, 0, entry.tokens, offset))
        return Binding(tuple(pieces), self.lineage.tokens, placement.position, tuple(arrivals))

    def _segment(self, entry: CacheEntry) -> Segment | None:
        """Return the segment of its KV in the pool or, if a request of the same step encodes it, the future one."""
        if entry.key in self.awaited and self.cache.lost(entry):
            under_way = self.recomputer.running.get(entry.key)
            return None if under_way is None else under_way.segment
        return entry.segment

    def unpin(self) -> None:
        arriving, self.arriving = self.arriving, []
        pinned, self.pinned = self.pinned, []
        with ExitStack() as all_of_it:  # whatever fails, the rest is released
            for segment in pinned:
                all_of_it.callback(self.cache.pool.unpin, segment)
            for entry, arrival in arriving:
                all_of_it.callback(self._withdraw, entry, arrival)

    def _withdraw(self, entry: CacheEntry, arrival: Arrival) -> None:
        if not arrival.is_there:
            self.cache.withdraw(entry, arrival)

    def close(self, request: Request) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as all_of_it:
            for parent in self.lineage.parents:
                all_of_it.callback(self.table.unwant, parent)
            for future in self.awaited.values():
                all_of_it.callback(future.cancel)


def _required(segment: Segment | None, entry: CacheEntry) -> Segment:
    """Return a segment that must be in the pool by now; raises `KVMemoryError` otherwise."""
    if segment is None:
        raise KVMemoryError(f"message {entry.key!r} is read before it is in the pool")
    return segment


class Recomputer:
    """Makes the requests that recompute lost messages, one at a time for each.

    Args:
        table: Table of the messages.
        number: Returns the number of a new request.
    """

    def __init__(self, table: MessageTable, number: Callable[[], int]) -> None:
        self.table, self._number = table, number
        self.running: dict[str, Request] = {}
        """Running requests, by the id of the message that they recompute."""

    def recompute(self, message: Message, reader: Request | None) -> tuple[Future[None], Request | None]:
        """Return a future that is done when a lost message is back, and the new request for it if none is running.

        Args:
            message: Message that is lost, or was never encoded.
            reader: Request that waits for it, and may be charged for it; None: none reads it.
        """
        future: Future[None] = Future()
        running = self.running.get(message.handle.id)
        if running is not None:
            running.futures.append(future)
            assert running.readers is not None
            if reader is not None and reader not in running.readers:
                running.readers.append(reader)
            return future, None
        first, lineage = message.promise is not None, message.lineage
        request = Request(
            self._number() if message.promise is None else message.promise,
            FromCache(lineage, self),
            _Recomputation(self, message, first=first),
            author=message.author,
            role=message.role,
            adapter=lineage.adapter,
            mapper=lineage.mapper,
            is_foreign=bool(message.foreign),
            tenant=lineage.tenant,
            label=message.label,
            again=message.again or not first,
            futures=[future],
            readers=[] if reader is None else [reader],
        )
        self.running[message.handle.id] = request
        return future, request

    def ended(self, message: Message, request: Request) -> None:
        """Forget a request that has ended."""
        if self.running.get(message.handle.id) is request:
            del self.running[message.handle.id]


@dataclass(eq=False)
class _Recomputation:
    """Owner of a request that recomputes a message: see `Owner`."""

    recomputer: Recomputer
    message: Message
    first: bool
    """Whether a lazy prefill is encoded for the first time."""

    def finish(self, request: Request) -> None:
        self.recomputer.ended(self.message, request)
        usage = Usage.of(request) if self.first else None
        request.encoding.close(request)
        segment = request.hand_over()
        assert segment is not None
        table = self.recomputer.table
        try:
            table.computed(self.message, segment, usage)
        finally:
            if self.message.entry is None or self.message.entry.segment is not segment:
                table.cache.pool.unpin(segment)

    def abandon(self, request: Request) -> None:
        self.recomputer.ended(self.message, request)
        request.give_back(self.recomputer.table.cache.pool)
