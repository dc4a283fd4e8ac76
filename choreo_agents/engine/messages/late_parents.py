"""What comes into the view of a decode while it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Request, all_or_none

Recompute = Callable[[Message, Request], tuple[Future[None], Request | None]]
"""For a lost message and its reader, what tells when it is back, and the request that brings it unless it is under way
already."""


@dataclass(eq=False)
class LateParent:
    """A message that is to come into a view, and where it stands there."""

    parent: Message
    offset: int
    entry: CacheEntry
    awaited: Future[None] | None = None
    """Done when it has been computed again."""
    since: int = 0
    """How many of the reader's own tokens were encoded before it came."""


class LateParents:
    """Of one decode: wants its messages from the moment they were added until it ends. Used under the engine's lock.

    Args:
        table: Has the messages.
        recompute: Brings back what is nowhere any more.
    """

    def __init__(self, table: MessageTable, recompute: Recompute) -> None:
        self._table = table
        self._cache = table.cache
        self._recompute = recompute
        self._coming: list[LateParent] = []
        self._pinned: list[Segment] = []
        self.joined: list[LateParent] = []
        """What is in the view, in the order in which it came."""
        self.over = False
        """Whether the decode has ended."""
        self.has_room: Callable[[CacheEntry], bool] = lambda entry: True
        """Whether its tenant may have a message in the pool beside what its calls read there already."""

    def add(self, parent: Message, offset: int) -> None:
        """Let a message come into the view as soon as its KV is in the pool."""
        assert not self.over
        self._coming.append(LateParent(parent, offset, self._table.want(parent)))

    @property
    def is_coming(self) -> bool:
        """Whether something was added that is not in the view yet."""
        return bool(self._coming)

    def reads(self) -> list[CacheEntry]:
        """What is in the view, and what is computed again for it."""
        awaited = (late for late in self._coming if late.awaited is not None)
        return [late.entry for late in (*self.joined, *awaited)]

    def settle(self, reader: Request) -> tuple[list[Piece], list[Request]]:
        """What can be seen from now on, pinned; and requests for what has to be computed again first.

        What the pool, or the tenant's share of it, has no room for yet is asked for again the next time: the decode
        goes on without it.

        Args:
            reader: The decode.
        """
        pieces: list[Piece] = []
        requests: list[Request] = []
        if not self._coming:
            return pieces, requests
        encoded = reader.encoded
        with all_or_none(requests):
            for late in list(self._coming):
                if not self._can_be_had(late):
                    self._coming.remove(late)
                    self._table.unwant(late.parent)
                elif not self.has_room(late.entry):
                    continue
                elif self._cache.fetch(late.entry):
                    segment = self._pinned_segment(late.entry)
                    if segment is not None:
                        self._coming.remove(late)
                        late.since = encoded
                        self.joined.append(late)
                        pieces.append(Piece(segment, 0, late.entry.tokens, late.offset, encoded))
                elif late.awaited is None and self._cache.lost(late.entry):
                    late.awaited, request = self._recompute(late.parent, reader)
                    requests += [] if request is None else [request]
        return pieces, requests

    def unpin(self) -> None:
        """Undo what `settle` has pinned."""
        pinned, self._pinned = self._pinned, []
        for segment in pinned:
            self._cache.pool.unpin(segment)

    def close(self) -> None:
        """The decode has ended: nothing is wanted for it any more."""
        self.over = True
        wanted, self._coming = [*self._coming, *self.joined], []
        for late in wanted:
            if late.awaited is not None:
                late.awaited.cancel()
        for late in wanted:
            self._table.unwant(late.parent)

    def _can_be_had(self, late: LateParent) -> bool:
        """False if what should have computed it again has failed: the decode does without it."""
        if late.awaited is None or not late.awaited.done():
            return True
        failed = late.awaited.exception() is not None
        late.awaited = None
        return not failed

    def _pinned_segment(self, entry: CacheEntry) -> Segment | None:
        """A fetched message's KV in the pool, pinned; None if there is no room for it now."""
        pool = self._cache.pool
        if entry.segment is None:
            self._cache.evict(pool.rounded(entry.tokens))
        if not self._cache.restore(entry):
            return None
        assert entry.segment is not None
        pool.pin(entry.segment)
        self._pinned.append(entry.segment)
        return entry.segment
