"""KV that is nowhere any more is computed again from its lineage: the same tokens after the same parents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from choreo_agents.engine.arrivals import Arrivals
from choreo_agents.engine.calls import Usage
from choreo_agents.engine.ledger import Ledger, Message
from choreo_agents.engine.placement import Placement
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.memory import Holding, KVCache
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Binding, Request


class Restorer:
    """Makes the requests that compute lost messages again, one for each at a time.

    Args:
        ledger: Whose messages they are.
        memory: Where their KV goes.
        number: Numbers the requests.
    """

    def __init__(self, ledger: Ledger, memory: KVCache, number: Callable[[], int]) -> None:
        self.ledger = ledger
        self.memory = memory
        self._number = number
        self._running: dict[str, Request] = {}

    def recompute(self, message: Message, reader: Request | None) -> tuple[Future[None], Request | None]:
        """What tells when a lost message is back, and the request that brings it unless it is under way already.

        Args:
            message: Lost, or never encoded.
            reader: Who waits for it, and may be charged for it; None: nobody who reads.
        """
        done: Future[None] = Future()
        running = self._running.get(message.handle.id)
        if running is not None:
            running.futures.append(done)
            assert running.readers is not None
            if reader is not None and reader not in running.readers:
                running.readers.append(reader)
            return done, None
        offsets = tuple(offset + message.native_offset for offset in message.relative_offsets)
        placement = Placement(offsets, message.native_offset, message.since)
        encoding = FromCache(message.tokens, message.parents, placement, self)
        order = _Recomputation(self, message)
        number = self._number() if message.promise is None else message.promise
        request = Request(number, encoding, order, None, message.author, message.role, [done])
        request.adapter, request.mapper = message.adapter, message.mapper
        request.tenant, request.label = message.tenant, message.label
        request.again = message.promise is None
        request.readers = [] if reader is None else [reader]
        self._running[message.handle.id] = request
        return done, request

    def running(self, message_id: str) -> Request | None:
        """The request that computes a message again, if there is one."""
        return self._running.get(message_id)

    def ended(self, message: Message) -> None:
        """The request that computed it is over."""
        del self._running[message.handle.id]


@dataclass(eq=False)
class _Recomputation:
    """Owns a request that computes a message again: see `Owner`."""

    restorer: Restorer
    message: Message
    encodes_end: bool = True

    def finish(self, request: Request) -> None:
        self.restorer.ended(self.message)
        segment = request.encoding.close(request)
        assert segment is not None
        if self.message.holding is not None and self.restorer.memory.lost(self.message.holding):
            self.restorer.memory.refill(self.message.holding, segment)
            if request.again:
                self.restorer.memory.movements.recomputed += 1
            else:
                self.message.promise = None
                self.message.usage = Usage.of(request)
        else:
            # Nobody wants it any longer.
            self.restorer.memory.pool.unpin(segment)

    def abandon(self, request: Request) -> None:
        self.restorer.ended(self.message)
        segment = request.encoding.close(request)
        if segment is not None:
            self.restorer.memory.pool.unpin(segment)


class FromCache:
    """A request over its parents' own encodings, wherever these are. Wants them from the call on, so that releasing a
    handle meanwhile harms nothing."""

    def __init__(
        self, tokens: tuple[int, ...], parents: Sequence[Message], placement: Placement, restorer: Restorer
    ) -> None:
        self.tokens = tokens
        self.parents = parents
        self.placement = placement
        self.restorer = restorer
        self.ledger, self.memory = restorer.ledger, restorer.memory
        self.holdings: list[Holding] = [self.ledger.want(parent) for parent in parents]
        self.different: list[Holding] = list(dict.fromkeys(self.holdings))
        self.awaited: dict[str, Future[None]] = {}
        self.pinned: list[Segment] = []
        self.arriving: list[tuple[Holding, Arrival]] = []
        """What its first step brings into the pool."""
        self.arrivals = Arrivals(self.ledger, self.memory, restorer.recompute)
        """What comes into its view while it runs."""

    def first(self, reader: Request) -> list[Request]:
        made: list[Request] = []
        for parent, holding in zip(self.parents, self.holdings, strict=True):
            if parent.handle.id not in self.awaited and self.memory.lost(holding):
                self.awaited[parent.handle.id], request = self.restorer.recompute(parent, reader)
                if request is not None:
                    made.append(request)
        return made

    def awaits(self) -> list[Request]:
        running = (self.restorer.running(message_id) for message_id in self.awaited)
        return [request for request in running if request is not None]

    def ready(self) -> bool:
        for message_id, done in list(self.awaited.items()):
            if done.done():
                del self.awaited[message_id]
                done.result()  # raises what kept it from being computed
        # What is on disk is asked for at once, not one after the other.
        there = [self.memory.fetch(holding) for holding in self.different]
        return all(there)

    def after(self) -> list[Request]:
        under_way = self.awaits()
        others = [self.memory.fetch(holding) for holding in self.different if holding.key not in self.awaited]
        return under_way if all(others) and len(under_way) == len(self.awaited) else []

    def claimed_tokens(self, counted: set[object]) -> int:
        # What is computed for it has a request of its own, which claims its room.
        coming = {h for h in self.different if h.key in self.awaited and self.memory.lost(h)}
        absent = {h for h in self.different if h.segment is None} - coming
        claimed = [h for h in self.different if h not in counted and (h in absent or h.idle())]
        counted.update(claimed)
        return sum(self.memory.pool.rounded(holding.tokens) for holding in claimed)

    def prompt_tokens(self) -> int:
        return len(self.tokens)

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        self.pinned = [segment for holding in self.different if (segment := self._segment(holding)) is not None]
        for segment in self.pinned:
            self.memory.pool.pin(segment)
        absent = sum(self.memory.pool.rounded(h.tokens) for h in self.different if self._segment(h) is None)
        return absent, len(self.tokens)

    def bind(self) -> Binding | None:
        arrivals: list[Arrival] = []
        for holding in self.different:
            if self._segment(holding) is None:
                if not self.memory.restore(holding, arrivals):
                    return None
                self.arriving += [(holding, arrival) for arrival in arrivals[len(self.arriving) :]]
                assert holding.segment is not None
                self.memory.pool.pin(holding.segment)
                self.pinned.append(holding.segment)
        pieces: list[Piece] = []
        placed = zip(self.holdings, self.placement.offsets, self.placement.seen_since(), strict=True)
        for holding, offset, since in placed:
            segment = self._segment(holding)
            assert segment is not None
            self.memory.touch(holding)
            pieces.append(Piece(segment, 0, holding.tokens, offset, since))
        return Binding(tuple(pieces), self.tokens, self.placement.new_offset, tuple(arrivals))

    def _segment(self, holding: Holding) -> Segment | None:
        """Where its KV is in the pool or, if a request of the same step encodes it, will be."""
        if holding.key in self.awaited and self.memory.lost(holding):
            under_way = self.restorer.running(holding.key)
            return None if under_way is None else under_way.segment
        return holding.segment

    def bound(self, segment: Segment) -> None: ...

    def grow(self, reader: Request) -> tuple[Sequence[Piece], Sequence[Request]]:
        return self.arrivals.settle(reader)

    def unpin(self) -> None:
        for holding, arrival in self.arriving:
            if not arrival.is_there:
                holding.withdraw(self.memory.pool, arrival)
                self.memory.movements.restored(arrival.from_disk, -1)
        self.arriving = []
        for segment in self.pinned:
            self.memory.pool.unpin(segment)
        self.pinned = []
        self.arrivals.unpin()

    def close(self, request: Request) -> Segment | None:
        self.arrivals.close()
        for done in self.awaited.values():
            done.cancel()
        for parent in self.parents:
            self.ledger.unwant(parent)
        return request.segment
