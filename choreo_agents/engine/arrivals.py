"""What comes into the view of a decode while it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from choreo_agents.engine.ledger import Ledger, Message
from choreo_agents.kv.memory import Holding, KVCache
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Request

Recompute = Callable[[Message, Request], tuple[Future[None], Request | None]]
"""For a lost message and its reader, what tells when it is back, and the request that brings it unless it is under way
already."""


@dataclass(eq=False)
class Arrival:
    """A message that is to come into a view, and where it stands there."""

    parent: Message
    offset: int
    holding: Holding
    awaited: Future[None] | None = None
    """Done when it has been computed again."""
    since: int = 0
    """How many of the reader's own tokens were encoded before it came."""


class Arrivals:
    """Of one decode: wants its messages from the moment they were added until it ends. Used under the engine's lock.

    Args:
        ledger: Whose messages they are.
        memory: Where their KV is.
        recompute: Brings back what is nowhere any more.
    """

    def __init__(self, ledger: Ledger, memory: KVCache, recompute: Recompute) -> None:
        self._ledger = ledger
        self._memory = memory
        self._recompute = recompute
        self._coming: list[Arrival] = []
        self._pinned: list[Segment] = []
        self.joined: list[Arrival] = []
        """What is in the view, in the order in which it came."""
        self.over = False
        """Whether the decode has ended."""

    def add(self, parent: Message, offset: int) -> None:
        """Let a message come into the view as soon as its KV is in the pool."""
        assert not self.over
        self._coming.append(Arrival(parent, offset, self._ledger.want(parent)))

    def settle(self, reader: Request) -> tuple[list[Piece], list[Request]]:
        """What can be seen from now on, pinned; and requests for what has to be computed again first.

        What the pool has no room for yet is asked for again the next time: the decode goes on without it.

        Args:
            reader: The decode.
        """
        pieces: list[Piece] = []
        requests: list[Request] = []
        encoded = reader.encoded
        for arrival in list(self._coming):
            if not self._can_be_had(arrival):
                self._coming.remove(arrival)
                self._ledger.unwant(arrival.parent)
            elif self._memory.fetch(arrival.holding):
                segment = self._pinned_segment(arrival.holding)
                if segment is not None:
                    self._coming.remove(arrival)
                    arrival.since = encoded
                    self.joined.append(arrival)
                    pieces.append(Piece(segment, 0, arrival.holding.tokens, arrival.offset, encoded))
            elif arrival.awaited is None and self._memory.lost(arrival.holding):
                arrival.awaited, request = self._recompute(arrival.parent, reader)
                requests += [] if request is None else [request]
        return pieces, requests

    def unpin(self) -> None:
        """Undo what `settle` has pinned."""
        for segment in self._pinned:
            self._memory.pool.unpin(segment)
        self._pinned = []

    def close(self) -> None:
        """The decode has ended: nothing is wanted for it any more."""
        self.over = True
        for arrival in self._coming:
            if arrival.awaited is not None:
                arrival.awaited.cancel()
        for arrival in (*self._coming, *self.joined):
            self._ledger.unwant(arrival.parent)
        self._coming = []

    def _can_be_had(self, arrival: Arrival) -> bool:
        """False if what should have computed it again has failed: the decode does without it."""
        if arrival.awaited is None or not arrival.awaited.done():
            return True
        failed = arrival.awaited.exception() is not None
        arrival.awaited = None
        return not failed

    def _pinned_segment(self, holding: Holding) -> Segment | None:
        """A fetched message's KV in the pool, pinned; None if there is no room for it now."""
        pool = self._memory.pool
        if holding.segment is None:
            self._memory.evict(pool.rounded(holding.tokens))
        if not self._memory.restore(holding):
            return None
        assert holding.segment is not None
        pool.pin(holding.segment)
        self._pinned.append(holding.segment)
        return holding.segment
