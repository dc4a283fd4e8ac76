"""What one tenant may take of an engine that it shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict, Field

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import Message
from choreo_agents.errors import ChoreoError, InvalidRequestError, KVBudgetError, QuotaError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store.eviction import leaving
from choreo_agents.runtime.request import Request


class Quota(BaseModel):
    """What a tenant may take; None: as much as there is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_bytes: int | None = Field(None, ge=1)
    """Of KV memory at once: of what its calls under way read and write at most, of what it has pinned, and of what else
    of its is there, which leaves for it, the least recently used first. Calls beyond it fail with `QuotaError`."""
    pinned_bytes: int | None = Field(None, ge=0)
    """Of KV memory that messages take which it pins at once; `kv.pin` beyond it fails with `QuotaError`."""
    requests: int | None = Field(None, ge=1)
    """Calls under way at once, waiting or running; more fail with `QuotaError`."""
    starts_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Calls that may start in a second, whoever makes them; the others wait in the order they came."""


class QuotaKeeper:
    """Keeps a tenant to its quota. Used under the engine's lock.

    Args:
        core: The engine.
        tenant: The tenant's name.
    """

    def __init__(self, core: EngineCore, tenant: str) -> None:
        self._core = core
        self._tenant = tenant
        self.quota = Quota()

    def admit(self, requests: Sequence[Request], *, goes_on: bool = False) -> None:
        """Let calls begin together, or go on in their own places, or raise.

        Raises:
            InvalidRequestError: They are more than may ever be under way; `KVBudgetError`: they need more memory.
            QuotaError: Other calls of the tenant are under way.
        """
        if not goes_on:
            self._require_few(requests)
        if requests and self.quota.pool_bytes is not None:
            self._make_room(requests, 0, set())

    def make_room(self, tokens: int) -> None:
        """Let so many more tokens into the pool; raises what `admit` raises."""
        if self.quota.pool_bytes is not None:
            self._make_room([], self._core.pool.rounded(tokens), set())

    def has_room(self, entry: CacheEntry, beside: Collection[CacheEntry] = ()) -> bool:
        """Whether one more message may be in the pool; what calls under way do not read leaves for it.

        Args:
            entry: The message's.
            beside: Of those that stay there, too.
        """
        if self.quota.pool_bytes is not None:
            there = {entry, *beside}
            try:
                self._make_room([], sum(self._core.pool.rounded(each.tokens) for each in there), there)
            except ChoreoError:
                return False
        return True

    def require_pin(self, message: Message, entry: CacheEntry) -> None:
        """Let a message be pinned.

        Raises:
            QuotaError: Others of the tenant are.
        """
        most = self.quota.pinned_bytes
        if most is None or entry.pins:
            return
        pool = self._core.pool  # which a message takes whole blocks of
        pinned = sum(pool.rounded(each.tokens) for each in self._core.cache.books.pinned(self._tenant))
        wanted = (pinned + pool.rounded(len(message.tokens))) * pool.geometry.bytes_per_token
        if wanted > most:
            raise QuotaError(
                f"with this message {wanted} bytes would be pinned, the tenant may pin {most}: unpin others first, or "
                "ask for a larger Quota(pinned_bytes=...)"
            )

    def _require_few(self, requests: Sequence[Request]) -> None:
        most = self.quota.requests
        if most is None or not requests:
            return
        if len(requests) > most:
            raise InvalidRequestError(
                f"{len(requests)} calls in one batch can never be under way together, the tenant may have {most}: make "
                "smaller batches"
            )
        under_way = len(self._under_way())
        if under_way + len(requests) > most:
            raise QuotaError(
                f"{under_way} calls of the tenant are under way and it may have {most}: wait for some of them, or ask "
                "for a larger Quota(requests=...)"
            )

    def _make_room(self, requests: Sequence[Request], more: int, seen: set[CacheEntry]) -> None:
        core, each = self._core, self._core.pool.geometry.bytes_per_token
        assert self.quota.pool_bytes is not None
        most = self.quota.pool_bytes // each
        alone = more + self._taken(requests, seen)
        if alone > most:
            raise KVBudgetError(
                f"the call and what it reads need KV memory for {alone} tokens ({alone * each} bytes), the tenant may "
                f"have {most}: show it less, lower max_tokens, or ask for a larger Quota(pool_bytes=...)"
            )
        needed = alone + self._taken(self._under_way(), seen)
        books = core.cache.books
        pinned = [entry for entry in books.pinned(self._tenant) if entry not in seen]
        needed += sum(core.pool.rounded(entry.tokens) for entry in pinned)
        if needed > most:
            raise QuotaError(
                f"with the tenant's other calls and pinned messages KV memory for {needed} tokens would be needed, it "
                f"may have {most}: wait for its calls, unpin messages, or ask for a larger Quota(pool_bytes=...)"
            )
        # What is seen is counted among the needed.
        idle = books.idle_tokens[self._tenant] - sum(entry.counted.idle_tokens for entry in seen)
        room = (
            (entry, entry.counted.idle_tokens)
            for entry in books.resident(self._tenant)
            if entry.counted.idle_tokens and entry not in seen
        )
        core.cache.park([*leaving(room, needed + idle - most)])

    def _taken(self, requests: Sequence[Request], seen: set[CacheEntry]) -> int:
        """Tokens of room that requests take at most, with what they read; what was seen before is not counted again."""
        pool, taken = self._core.pool, 0
        for request in requests:
            taken += pool.rounded(request.room()) if request.segment is None else request.segment.capacity
            read = [entry for entry in request.encoding.reads() if entry not in seen]
            taken += sum(pool.rounded(entry.tokens) for entry in dict.fromkeys(read))
            seen.update(read)
        return taken

    def _under_way(self) -> list[Request]:
        """The tenant's calls that are; not what is computed again for one of them, which reads it."""
        return [request for request in self._core.loop.requests_of(self._tenant) if request.readers is None]
