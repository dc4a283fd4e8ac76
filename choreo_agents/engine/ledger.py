"""The table of messages: who leases them, what they descend from, and which decode answers which call."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from choreo_agents.engine.calls import Usage
from choreo_agents.engine.scope import Scope
from choreo_agents.errors import ForeignHandleError, InvalidRequestError, ReleasedHandleError, UnknownHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.memory import Holding, KVCache
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import Stored
from choreo_agents.sampling import Chosen

_REMEMBERED_RELEASES = 65_536


@dataclass(eq=False)
class Message:
    """One message. It refers to its parents, so that lineage lives as long as any descendant does.

    `tokens`, `parents`, `relative_offsets`, `since`, `adapter` and `mapper` with the model's fingerprint are its
    lineage: from them its KV can be computed again, at `native_offset` as the first time.
    """

    handle: MessageHandle
    tenant: str
    """Who alone may use it."""
    tokens: tuple[int, ...]
    parents: tuple[Message, ...]
    relative_offsets: tuple[int, ...]
    author: str | None
    """Who said it first."""
    role: str | None
    usage: Usage
    adapter: str = ""
    """Fingerprint of the adapter that encoded it; empty: the model alone."""
    mapper: str = ""
    """Fingerprint of the cache mapper that made its KV of its one parent's; empty: it was encoded."""
    promise: int | None = None
    """As long as nobody has encoded it: the number of the request that will, for whoever reads it first."""
    label: str = ""
    """What the request that made it was called."""
    since: tuple[int, ...] = ()
    """For each parent, how many of the message's tokens were encoded before it came into view; empty: none."""
    native_offset: int = 0
    """Where its KV was encoded; under a method that keeps text only, where its call placed it."""
    holding: Holding | None = None
    """Where its KV is while it is leased or a request wants it; None else, and always under a method that keeps text
    only."""
    chosen: tuple[Chosen, ...] = ()
    """What was sampled, if it was decoded: less than all tokens by the header and what closed it."""
    header: int = 0
    """How many of its tokens came before these."""
    leases: int = 0
    scoped: Counter[Scope] = field(default_factory=Counter)
    """Which of the leases end with a scope."""
    memos: set[str] = field(default_factory=set)
    authors: set[str] = field(default_factory=set)
    """All who said it: equal words in an equal place are one message."""
    confidential: bool = False
    """Whether any of them marked it so."""
    sources: list[Message] = field(default_factory=list)
    """The messages whose words were encoded again as this one."""
    copies: list[Message] = field(default_factory=list)
    """Mapped copies of it, which have a lease for as long as it has any."""

    def leases_within(self, scope: Scope | None) -> int:
        """Leases that last as long as a scope does: its own, those of scopes around it, and those of none."""
        around = set() if scope is None else set(scope.chain())
        return self.leases - sum(count for held, count in self.scoped.items() if held not in around)

    def leased_only_within(self, scope: Scope) -> bool:
        """Whether all its leases end with a scope, or with one inside of it."""
        inside = sum(count for held, count in self.scoped.items() if scope in held.chain())
        return self.leases == inside + (self.is_kept() and self.parents[0].leased_only_within(scope))

    def is_kept(self) -> bool:
        """Whether it is a mapped copy that has the lease of its source."""
        return bool(self.mapper) and self in self.parents[0].copies

    def ancestors(self) -> Iterator[Message]:
        """All that its encoding has ever attended to, nearest first, each once."""
        seen = {self.handle.id}
        queue = list(self.parents)
        for message in queue:
            if message.handle.id not in seen:
                seen.add(message.handle.id)
                queue.extend(message.parents)
                yield message


class Ledger:
    """All messages of one engine. Used under the engine's lock only.

    Args:
        memory: Where their KV is.
        fingerprint: Of the model.
        mapped_storage: How that of mapped copies is kept below the pool.
    """

    def __init__(self, memory: KVCache, fingerprint: str, mapped_storage: Stored = "full") -> None:
        self._memory = memory
        self._mapped_storage = mapped_storage
        self._fingerprint = fingerprint
        self._leased: dict[str, Message] = {}
        self._known: WeakValueDictionary[str, Message] = WeakValueDictionary()
        self._released: OrderedDict[str, str] = OrderedDict()
        """Whose they were, by id."""
        self._memos: dict[str, Message] = {}
        self._in_scope: dict[Scope, dict[Message, None]] = {}
        """What has been leased in each scope that is open."""
        self._moving: dict[str, int] = {}
        """From one memory to another: how often each message is pinned."""

    def leave_memory(self) -> None:
        """The memory is given up: all messages are lineage only, until there is another."""
        for message in self._known.values():
            if message.holding is not None:
                self._moving[message.handle.id] = message.holding.pins
                message.holding = None

    def enter_memory(self, memory: KVCache) -> Ledger:
        """The same messages over another, empty memory: what is read of them is computed again."""
        self._memory = memory
        for message_id, pins in self._moving.items():
            message = self._leased.get(message_id)
            if message is not None:
                message.holding = self._hold(message, None)
                message.holding.pins = pins
        self._moving.clear()
        return self

    def find(self, handle: MessageHandle, tenant: str) -> Message:
        """The leased message that a tenant's handle names.

        Raises:
            InvalidRequestError: It is no handle at all.
            ForeignHandleError: It was made by another model.
            ReleasedHandleError: Its last lease was dropped.
            UnknownHandleError: This engine never made it for this tenant.
        """
        require_handle(handle)
        message = self._leased.get(handle.id)
        if message is not None and message.tenant == tenant and handle.model == message.handle.model:
            return message
        if handle.base_model != self._fingerprint:
            raise ForeignHandleError(
                f"handle {handle.id!r} was made by model {handle.base_model!r}, this engine runs "
                f"{self._fingerprint!r}: pass the words instead and prefill them here"
            )
        if self._released.get(handle.id) == tenant or self._descended(handle.id, tenant):
            raise ReleasedHandleError(
                f"handle {handle.id!r} was released: its last lease was dropped by release() or the end of a scope. "
                "Prefill or decode it again"
            )
        raise UnknownHandleError(
            f"handle {handle.id!r} is unknown: this engine never made it. Handles live in the engine that made them, "
            "under the salt it was loaded with"
        )

    def get(self, message_id: str) -> Message | None:
        """The leased message with this id, if there is one."""
        return self._leased.get(message_id)

    def enter(self, message: Message, segment: Segment | None) -> Message:
        """Add a message without leases yet, or find the leased one with the same id; takes over the segment's pin."""
        known = self._known.get(message.handle.id)
        if known is None:
            self._known[message.handle.id] = known = message
        if segment is not None or known.holding is None or self._memory.lost(known.holding):
            known.usage, known.promise = message.usage, message.promise
        if message.chosen and (not known.chosen or known.chosen[0].logprob is None):
            known.chosen, known.header = message.chosen, message.header
        if segment is not None and known.holding is not None and self._memory.lost(known.holding):
            self._memory.refill(known.holding, segment)
        elif segment is not None and known.holding is None:
            known.native_offset = segment.native_offset
            known.holding = self._hold(known, segment)
        elif segment is not None:
            # The same content was decoded twice: the first encoding serves both.
            self._memory.pool.unpin(segment)
        return known

    def place(self, message: Message) -> Holding:
        """Where a leased message's KV is, or will be if there is none."""
        if message.holding is None:
            message.holding = self._hold(message, None)
        return message.holding

    def want(self, message: Message) -> Holding:
        """A request is to read a message, released or not: keep its KV, or a place for it, until `unwant`."""
        holding = self.place(message)
        self._memory.want(holding)
        return holding

    def unwant(self, message: Message) -> None:
        """The request that wanted it has ended."""
        assert message.holding is not None
        self._memory.unwant(message.holding)
        self._free_if_unneeded(message)

    def lease(self, message: Message, scope: Scope | None) -> None:
        """Add a lease, counted by the scope it was taken in."""
        message.leases += 1
        self._leased[message.handle.id] = message
        self._released.pop(message.handle.id, None)
        if scope is not None:
            message.scoped[scope] += 1
            self._in_scope.setdefault(scope, {})[message] = None

    def release(self, message: Message, scope: Scope | None) -> None:
        """Drop a lease: one of the caller's scope or those around it, else one of no scope, else any.

        The last one frees the message's KV as soon as no request wants it.
        """
        assert message.leases > 0
        mine = next((held for held in scope.chain() if message.scoped[held]), None) if scope is not None else None
        if mine is None and message.scoped.total() == message.leases:
            mine = next(held for held, count in message.scoped.items() if count)
        if mine is not None:
            message.scoped[mine] -= 1
            message.scoped += Counter()  # forget scopes that count nothing any more
        message.leases -= 1
        self.drop_if_unleased(message)

    def close(self, scope: Scope) -> None:
        """Drop all leases that a scope counts."""
        for message in self._in_scope.pop(scope, ()):
            count = message.scoped.pop(scope, 0)
            message.leases -= count
            if count:
                self.drop_if_unleased(message)

    def drop_tenant(self, tenant: str) -> None:
        """Drop all leases and pins of a tenant's messages."""
        for message in self.messages():
            if message.tenant == tenant:
                if message.holding is not None:
                    message.holding.pins = 0
                while message.leases:
                    self.release(message, None)

    def drop_if_unleased(self, message: Message) -> None:
        """Free a message that nobody leases."""
        if message.leases:
            return
        self._leased.pop(message.handle.id, None)
        for memo in message.memos:
            del self._memos[memo]
        message.memos.clear()
        if message.is_kept():
            message.parents[0].copies.remove(message)
        copies, message.copies = message.copies, []
        for copy in copies:
            self.release(copy, None)
        self._released[message.handle.id] = message.tenant
        while len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        self._free_if_unneeded(message)

    def keep(self, source: Message, copy: Message, scope: Scope | None) -> None:
        """A copy's lease, taken in a scope, becomes its source's; one is enough."""
        self.lease(copy, None)
        self.release(copy, scope)
        if copy is source or copy in source.copies:
            self.release(copy, None)
        else:
            source.copies.append(copy)

    def _hold(self, message: Message, segment: Segment | None) -> Holding:
        stored = self._mapped_storage if message.mapper else "full"
        held = Holding(message.handle.id, len(message.tokens), message.native_offset, segment, stored=stored)
        return self._memory.hold(held)

    def _free_if_unneeded(self, message: Message) -> None:
        if message.holding is not None and not message.leases and not message.holding.wanted:
            self._memory.drop(message.holding)
            message.holding = None

    def memoise(self, memo: str, message: Message) -> None:
        """Remember the answer to a call for as long as it is leased."""
        self._memos[memo] = message
        message.memos.add(memo)

    def recall(self, memo: str) -> Message | None:
        """The answer to a call that was made before."""
        return self._memos.get(memo)

    def _descended(self, message_id: str, tenant: str) -> bool:
        """Whether a tenant's message is known still, though nobody leases it: it has descendants."""
        known = self._known.get(message_id)
        return known is not None and known.tenant == tenant and not known.leases

    def messages(self) -> list[Message]:
        return list(self._leased.values())

    def check(self) -> None:
        """Assert that leases, segments and memos agree."""
        for message_id, message in self._leased.items():
            assert message.handle.id == message_id and message.leases > 0
            assert message.scoped.total() <= message.leases and not any(scope.closed for scope in message.scoped)
            assert message.handle.length == len(message.tokens)
            assert all(copy.parents == (message,) and copy.handle.id in self._leased for copy in message.copies)
            assert len(set(message.copies)) == len(message.copies)
            if message.holding is not None:
                assert message.holding.key == message_id and message.holding.tokens == len(message.tokens)
        for memo, message in self._memos.items():
            assert message.leases > 0 and memo in message.memos


def require_handle(handle: object) -> None:
    """Raise `InvalidRequestError` unless it is a handle."""
    if not isinstance(handle, MessageHandle):
        raise InvalidRequestError(f"expected a MessageHandle, not {handle!r}: use MessageHandle.model_validate")
