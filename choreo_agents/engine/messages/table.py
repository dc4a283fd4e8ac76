"""The table of messages: who leases them, what they descend from, and which decode answers which call."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from choreo_agents.engine.messages.message import Message, Scope, Thought, Usage
from choreo_agents.errors import (
    ForeignHandleError,
    HandleError,
    InvalidRequestError,
    KVMemoryError,
    ReleasedHandleError,
    UnknownHandleError,
)
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Segment
from choreo_agents.sampling import SampledToken

_REMEMBERED_RELEASES = 65_536


class MessageTable:
    """All messages of one engine. Used under the engine's lock only.

    Args:
        cache: Where their KV is.
        fingerprint: Of the model.
    """

    def __init__(self, cache: KVCache, fingerprint: str) -> None:
        self.cache = cache
        self._fingerprint = fingerprint
        self._leased: dict[str, Message] = {}
        self._messages: Counter[str] = Counter()
        """How many of them are whose, ..."""
        self._leases: Counter[str] = Counter()
        """... and how many leases they have."""
        self._known: WeakValueDictionary[str, Message] = WeakValueDictionary()
        self._released: OrderedDict[str, str] = OrderedDict()
        """Whose they were, by id."""
        self.memos: dict[str, Message] = {}
        """The answers to calls that may be made again, by their idempotency keys. A message knows its own, too."""
        self._in_scope: dict[Scope, dict[Message, None]] = {}
        """What has been leased in each scope that is open."""
        self._moving: dict[str, int] = {}
        """From one memory to another: how often each message is pinned."""

    def leave_cache(self) -> None:
        """The memory is given up: all messages are lineage only, until there is another."""
        for message in self._known.values():
            if message.entry is not None:
                self._moving[message.handle.id] = message.entry.pins
                message.entry = None

    def enter_cache(self, cache: KVCache) -> MessageTable:
        """The same messages over another, empty memory: what is read of them is computed again."""
        self.cache = cache
        for message_id, pins in self._moving.items():
            message = self._leased.get(message_id)
            if message is not None:
                self._hold(message, None).pins = pins
        self._moving.clear()
        return self

    def find(self, handle: MessageHandle, tenant: str) -> Message:
        """The leased message that a tenant's handle names.

        Raises:
            InvalidRequestError: It is no handle at all.
            ForeignHandleError: It was made by another model.
            ReleasedHandleError: Its last lease was dropped.
            UnknownHandleError: This engine never made it for this tenant, or made it otherwise than it says.
        """
        require_handle(handle)
        message = self._leased.get(handle.id)
        if message is not None and message.tenant == tenant and handle == message.handle:
            return message
        released = self._released.get(handle.id) == tenant or self._descended(handle.id, tenant)
        mine = message if message is not None and message.tenant == tenant else None
        raise _refusal(handle, mine, released, self._fingerprint)

    def get(self, message_id: str) -> Message | None:
        """The leased message with this id, if there is one."""
        return self._leased.get(message_id)

    def known(self, message_id: str) -> Message | None:
        """The message with this id, leased or not, if anything refers to it."""
        return self._known.get(message_id)

    @contextmanager
    def entering(self, made: Message, segment: Segment | None = None) -> Iterator[Message]:
        """Add a message, or find the one with the same id, for a block that leases it: nobody keeps it otherwise.

        All or nothing: if anything fails, here or in the block, messages, leases and idempotency keys are as they were,
        and the segment is given back unless somebody waits to read this very message.

        Args:
            made: The message.
            segment: Its KV. The pin is taken over in any case: for the message, or given back.
        """
        known = self.known(made.handle.id)
        message = made if known is None else known
        before = message.remembered()
        held = False
        try:
            lost = message.entry is None or self.cache.lost(message.entry)
            held = segment is not None and lost
            self.fill(message, segment if lost else None)
            if segment is not None or lost:
                message.usage, message.promise, message.again = made.usage, made.promise, made.again
            message.finish_reason = made.finish_reason or message.finish_reason
            if made.chosen is not None and not (message.chosen and _tells_more(message.chosen, made.chosen)):
                message.chosen, message.header = made.chosen, made.header
            yield message
            self.drop_if_unleased(message)
        except BaseException:
            holder = None if segment is None else segment.holder
            held = holder is not None
            if isinstance(holder, CacheEntry) and holder is not message.entry:
                self.cache.drop(holder)
            # Whoever wants to read it meanwhile waits for this entry; the rest is as before.
            self._count(message, before["leases"] - message.leases)
            vars(message).update(before | {"entry": message.entry, "lineage": message.lineage})
            for memo in [
                memo for memo, known in self.memos.items() if known is message and memo not in message.idempotency_keys
            ]:
                del self.memos[memo]
            if not message.leases:
                self._leased.pop(message.handle.id, None)
            self._free_if_unneeded(message)
            raise
        finally:
            if segment is not None and not held:
                # The same content was decoded twice, and the first encoding serves both; or nothing came of it.
                self.cache.pool.unpin(segment)

    def fill(self, message: Message, segment: Segment | None) -> None:
        """Know a message; with a segment, that holds its KV from now on."""
        if segment is not None and message.entry is None:
            message.lineage = message.lineage.at(segment.native_offset)
            self._hold(message, segment)
        elif segment is not None and message.entry is not None:
            self.cache.refill(message.entry, segment)
        self._known[message.handle.id] = message

    def entry(self, message: Message) -> CacheEntry:
        """Where a leased message's KV is, or will be if there is none."""
        return message.entry or self._hold(message, None)

    def computed(self, message: Message, segment: Segment, first: Usage | None) -> None:
        """A lost message's KV is there again, or, with its usage, for the first time.

        Its entry holds the segment then, whose pin it takes over; unless nobody wants it any longer.
        """
        if message.entry is None or not self.cache.lost(message.entry):
            return
        self.cache.refill(message.entry, segment)
        if first is None:
            self.cache.tier_counters.add(message.tenant, "recomputed")
        else:
            message.promise, message.usage = None, first

    def want(self, message: Message) -> CacheEntry:
        """A request is to read a message, released or not: keep its KV, or a place for it, until `unwant`."""
        entry = self.entry(message)
        self.cache.want(entry)
        return entry

    def unwant(self, message: Message) -> None:
        """The request that wanted it has ended."""
        if message.entry is None:
            raise KVMemoryError(f"message {message.handle.id!r} is given up by a request that never wanted it")
        self.cache.unwant(message.entry)
        self._free_if_unneeded(message)

    def remember(self, memo: str, message: Message, scope: Scope | None) -> None:
        """Remember a call's answer, its last, while that is leased; where its scope is a thread's, until that ends."""
        if memo in self.memos:
            del self.memos[memo].idempotency_keys[memo]
        self.memos[memo] = message
        message.idempotency_keys[memo] = scope

    def lease(self, message: Message, scope: Scope | None) -> None:
        """Add a lease, counted by the scope it was taken in."""
        self._count(message, 1)
        message.forgotten = False
        self._leased[message.handle.id] = message
        self._released.pop(message.handle.id, None)
        if scope is not None:
            message.scoped[scope] += 1
            self._in_scope.setdefault(scope, {})[message] = None

    def release(self, message: Message, scope: Scope | None, *, forgotten: bool = False) -> None:
        """Drop a lease: one of the caller's scope or those around it, else one of no scope, else any.

        The last one frees the message's KV as soon as no request wants it. For `forgotten` see `close`.
        """
        if not message.leases:
            raise KVMemoryError(f"message {message.handle.id!r} is released more often than leased")
        mine = next((held for held in scope.chain() if message.scoped[held]), None) if scope is not None else None
        if mine is None and message.scoped.total() == message.leases:
            mine = next(held for held, count in message.scoped.items() if count)
        if mine is not None:
            message.scoped[mine] -= 1
            if not message.scoped[mine]:
                # Nothing of a scope that counts nothing any more may keep the message alive, nor what is said of it.
                del message.scoped[mine], self._in_scope[mine][message]
        self._count(message, -1)
        self.drop_if_unleased(message, forgotten=forgotten)

    def close(self, scope: Scope, *, forgotten: bool = False) -> None:
        """Drop all leases that a scope counts, and if it is a thread's, what it has answered with messages of others.

        Args:
            scope: Which.
            forgotten: Whether handles that nobody leases then are unknown, and not refused as released.
        """
        scope.closed = True
        held = self._in_scope.pop(scope, {})
        for message in held:
            count = message.scoped.pop(scope, 0)
            self._count(message, -count)
            if count:
                self.drop_if_unleased(message, forgotten=forgotten)
        for message in held if scope.is_threads else ():
            for memo in message.forget(scope):
                del self.memos[memo]

    def held_in(self, scope: Scope) -> Collection[Message]:
        """What has leases that a scope counts."""
        return self._in_scope.get(scope, {}).keys()

    def drop_tenant(self, tenant: str) -> None:
        """Drop all leases and pins of a tenant's messages."""
        for message in self.messages(tenant):
            if message.entry is not None:
                message.entry.pins = 0
            while message.leases:
                self.release(message, None)
        for counts in (self._messages, self._leases):
            counts.pop(tenant, None)

    def drop_if_unleased(self, message: Message, *, forgotten: bool = False) -> None:
        """Free a message that nobody leases, and what was thought by calls that do not. For `forgotten` see `close`."""
        for thought in message.forget_thoughts():
            if thought.message.leases:  # of a tenant that goes all leases are dropped, in any order
                self.release(thought.message, None, forgotten=forgotten)
        if message.leases:
            return
        message.forgotten = forgotten
        self._leased.pop(message.handle.id, None)
        for memo in message.idempotency_keys:
            self.memos.pop(memo, None)
        message.idempotency_keys.clear()
        if message.is_kept():
            message.parents[0].copies.remove(message)
        copies, message.copies = message.copies, []
        for each in copies:
            self.release(each, None, forgotten=forgotten)
        if not forgotten:
            self._released[message.handle.id] = message.tenant
        while len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        self._free_if_unneeded(message)

    def keep(self, holder: Message, kept: Message | Thought, scope: Scope | None) -> None:
        """The lease of a message's copy, or of what was thought before it, taken in a scope, becomes its own."""
        held: list[Any] = holder.thoughts if isinstance(kept, Thought) else holder.copies
        leased = kept.message if isinstance(kept, Thought) else kept
        self.lease(leased, None)
        self.release(leased, scope)
        if leased is holder or kept in held:
            self.release(leased, None)  # one is enough
        if leased is not holder:
            held[:] = [*(each for each in held if each != kept), kept]  # the latest stands last

    def _hold(self, message: Message, segment: Segment | None) -> CacheEntry:
        held = CacheEntry(message.handle.id, len(message.tokens), message.native_offset, segment, tenant=message.tenant)
        try:
            message.entry = self.cache.hold(held)
        except BaseException:
            if segment is None and held.changed is not None:  # a segment's is looked for by who gave that
                self.cache.drop(held)
            raise
        return held

    def _count(self, message: Message, more: int) -> None:
        """Have so many more leases on a message."""
        self._messages[message.tenant] += bool(message.leases + more) - bool(message.leases)
        self._leases[message.tenant] += more
        message.leases += more

    def _free_if_unneeded(self, message: Message) -> None:
        if message.entry is not None and not message.leases and not message.entry.wanted:
            self.cache.drop(message.entry)
            message.entry = None

    def _descended(self, message_id: str, tenant: str) -> bool:
        """Whether a tenant's message is known still, though nobody leases it: it has descendants."""
        known = self._known.get(message_id)
        return known is not None and known.tenant == tenant and not known.leases and not known.forgotten

    def counts(self, tenant: str | None) -> tuple[int, int]:
        """Count messages and leases, of one tenant or of all."""
        if tenant is None:
            return self._messages.total(), self._leases.total()
        return self._messages[tenant], self._leases[tenant]

    def messages(self, tenant: str | None = None) -> list[Message]:
        """List what is leased, of one tenant or of all."""
        return [message for message in self._leased.values() if tenant in (None, message.tenant)]

    def check(self) -> None:
        """Assert that leases, segments and idempotency keys agree."""
        for message_id, message in self._leased.items():
            assert message.handle.id == message_id
            message.check()
        assert +self._messages == Counter(message.tenant for message in self._leased.values())
        assert self._leases.total() == sum(message.leases for message in self._leased.values())
        for memo, message in self.memos.items():
            assert message.leases > 0 and memo in message.idempotency_keys


def _tells_more(known: Sequence[SampledToken], made: Sequence[SampledToken]) -> bool:
    """Whether of two ways to sample one message the known one, in which something was sampled, is to be kept."""
    return not made or known[0].logprob is not None


def _refusal(handle: MessageHandle, message: Message | None, released: bool, fingerprint: str) -> HandleError:
    """Why a handle is no good: it is another model's, or what it names is another message, was released, or unknown."""
    if handle.base_model != fingerprint:
        return ForeignHandleError(
            f"handle {handle.id!r} was made by model {handle.base_model!r}, this engine runs {fingerprint!r}: pass the "
            "words instead and prefill them here"
        )
    if released:
        return ReleasedHandleError(
            f"handle {handle.id!r} was released: its last lease was dropped by release() or the end of a scope. "
            "Prefill or decode it again"
        )
    if message is not None:
        return UnknownHandleError(
            f"handle {handle.id!r} says length={handle.length} and model={handle.model!r}, but was made with "
            f"length={message.handle.length} and model={message.handle.model!r}: use it as the engine gave it out"
        )
    return UnknownHandleError(
        f"handle {handle.id!r} is unknown: this engine never made it, or has forgotten it with its thread. Handles "
        "live in the engine that made them, under the salt it was loaded with: encode the words again"
    )


def require_handle(handle: object) -> MessageHandle:
    """The same; raises `InvalidRequestError` unless it is a handle."""
    if not isinstance(handle, MessageHandle):
        raise InvalidRequestError(f"expected a MessageHandle, not {handle!r}: use MessageHandle.model_validate")
    return handle
