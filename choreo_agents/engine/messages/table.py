"""Table of messages: their leases, ids and KV entries, and which message answers which call.

Also method "choreo": calls attend to their parents' own KV at any position; lost KV is computed again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from choreo_agents.engine.messages.message import Lineage, Message, Scope, Thought, Usage
from choreo_agents.errors import (
    ForeignHandleError,
    HandleError,
    InvalidRequestError,
    KVMemoryError,
    ReleasedHandleError,
    UnknownHandleError,
)
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Binding, Encoding, Request
from choreo_agents.sampling import SampledToken

_REMEMBERED_RELEASES = 65_536


class MessageTable:
    """All messages of one engine. Used under the engine's lock only.

    Args:
        cache: Cache that holds their KV.
        fingerprint: Fingerprint of the model.
        number: Returns the number of a new request.
    """

    def __init__(self, cache: KVCache, fingerprint: str, number: Callable[[], int]) -> None:
        self.cache = cache
        self._fingerprint, self._number = fingerprint, number
        self.recomputing: dict[str, Request] = {}
        """Running requests that recompute messages, one at a time for each, by the id of the message."""
        self._leased: dict[str, Message] = {}
        self._messages: Counter[str] = Counter()
        """Number of leased messages by tenant, ..."""
        self._leases: Counter[str] = Counter()
        """... and of their leases: what it takes to tell a tenant's must not depend on others."""
        self._known: WeakValueDictionary[str, Message] = WeakValueDictionary()
        self._released: OrderedDict[str, str] = OrderedDict()
        """Tenants of released messages, by message id."""
        self.memos: dict[str, Message] = {}
        """Answers of calls that may be repeated, by idempotency key. A message has its own keys, too."""
        self._in_scope: dict[Scope, dict[Message, None]] = {}
        """Messages leased in each open scope."""

    def move_to(self, cache: KVCache) -> None:
        """Attach the messages to another, empty cache: only lineage is left, and what is read is computed again."""
        self.cache = cache
        self.recomputing.clear()
        for message in list(self._known.values()):
            entry, message.entry = message.entry, None
            if entry is not None and message.leases:
                cache.pin(self._add_entry(message, None), entry.pins)

    def find(self, handle: MessageHandle, tenant: str) -> Message:
        """Return the leased message that a tenant's handle names.

        Raises:
            InvalidRequestError: It is not a handle.
            ForeignHandleError: It was created by another model.
            ReleasedHandleError: Its last lease was dropped.
            UnknownHandleError: This engine never created it for this tenant, or with other fields.
        """
        require_handle(handle)
        message = self._leased.get(handle.id)
        if message is not None and message.tenant == tenant and handle == message.handle:
            return message
        own = message if message is not None and message.tenant == tenant else None
        raise _handle_error(handle, own, self._released.get(handle.id) == tenant, self._fingerprint)

    def get(self, message_id: str) -> Message | None:
        """Return the leased message with this id, or None."""
        return self._leased.get(message_id)

    def known(self, message_id: str) -> Message | None:
        """Return the message with this id, leased or not, if anything refers to it."""
        return self._known.get(message_id)

    @contextmanager
    def insert_transaction(self, created: Message, segment: Segment | None = None) -> Iterator[Message]:
        """Insert a message, or find the one with the same id, for a block that must lease it to keep it.

        All or nothing: on any error, here or in the block, messages, leases and idempotency keys are restored, and the
        segment is released unless a request waits to read this very message.

        Args:
            created: The message.
            segment: Its KV. The pin is taken over in any case: for the message, or released.
        """
        existing = self.known(created.handle.id)
        message = created if existing is None else existing
        before = message.remembered()
        is_taken = False
        try:
            lost = message.entry is None or self.cache.lost(message.entry)
            is_taken = segment is not None and lost
            self.fill(message, segment if lost else None)
            if segment is not None or lost:
                message.usage, message.promise, message.again = created.usage, created.promise, created.again
            message.finish_reason = created.finish_reason or message.finish_reason
            if created.chosen is not None and not (message.chosen and _is_richer(message.chosen, created.chosen)):
                message.chosen, message.header = created.chosen, created.header
            yield message
            self.drop_if_unleased(message)
        except BaseException:
            holder = None if segment is None else segment.holder
            is_taken = holder is not None
            if isinstance(holder, CacheEntry) and holder is not message.entry:
                self.cache.drop(holder)
            # A request that wants to read it meanwhile waits for this entry; the rest is restored.
            self._count(message, before["leases"] - message.leases)
            vars(message).update(before | {"entry": message.entry, "lineage": message.lineage})
            for memo in [
                memo for memo, value in self.memos.items() if value is message and memo not in message.idempotency_keys
            ]:
                del self.memos[memo]
            if not message.leases:
                self._leased.pop(message.handle.id, None)
            self._free_if_unneeded(message)
            raise
        finally:
            if segment is not None and not is_taken:
                # The same content was decoded twice, and the first encoding serves both; or the insertion failed.
                self.cache.pool.unpin(segment)

    def fill(self, message: Message, segment: Segment | None) -> None:
        """Register a message; a segment becomes its KV."""
        if segment is not None and message.entry is None:
            message.lineage = message.lineage.at(segment.native_offset)
            self._add_entry(message, segment)
        elif segment is not None and message.entry is not None:
            self.cache.refill(message.entry, segment)
        self._known[message.handle.id] = message

    def entry(self, message: Message) -> CacheEntry:
        """Return the cache entry of a leased message, new if it has none."""
        return message.entry or self._add_entry(message, None)

    def recompute(self, message: Message, reader: Request | None) -> tuple[Future[None], Request | None]:
        """Return a future that is done when a lost message is back, and the new request for it if none is running.

        Args:
            message: Message that is lost, or was never encoded.
            reader: Request that waits for it, and may be charged for it; None: none reads it.
        """
        future: Future[None] = Future()
        running = self.recomputing.get(message.handle.id)
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
        self.recomputing[message.handle.id] = request
        return future, request

    def computed(self, message: Message, segment: Segment, first: Usage | None) -> None:
        """Store the KV of a lost message or, with its usage, of one that was never encoded.

        Its entry takes over the segment's pin, unless nobody wants it any longer.
        """
        if message.entry is None or not self.cache.lost(message.entry):
            return
        self.cache.refill(message.entry, segment)
        if first is None:
            self.cache.tier_counters.add(message.tenant, "recomputed")
        else:
            message.promise, message.usage = None, first

    def want(self, message: Message) -> CacheEntry:
        """Keep a message's entry until `unwant`, released or not: a request is to read it."""
        entry = self.entry(message)
        self.cache.want(entry)
        return entry

    def unwant(self, message: Message) -> None:
        """Undo `want` when the request has ended."""
        if message.entry is None:
            raise KVMemoryError(f"message {message.handle.id!r} is dropped by a request that does not hold it")
        self.cache.unwant(message.entry)
        self._free_if_unneeded(message)

    def remember(self, memo: str, message: Message, scope: Scope | None) -> None:
        """Remember a call's last answer while that is leased; if its scope is a thread's, until the scope ends."""
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
        counted = next((s for s in scope.chain() if message.scoped[s]), None) if scope is not None else None
        if counted is None and message.scoped.total() == message.leases:
            counted = next(s for s, count in message.scoped.items() if count)
        if counted is not None:
            message.scoped[counted] -= 1
            if not message.scoped[counted]:
                # A scope without leases must not keep the message and its notes alive.
                del message.scoped[counted], self._in_scope[counted][message]
        self._count(message, -1)
        self.drop_if_unleased(message, forgotten=forgotten)

    def close(self, scope: Scope, *, forgotten: bool = False) -> None:
        """Drop all leases that a scope counts, and if it is a thread's, the answers it remembers in others' messages.

        Args:
            scope: Scope to close.
            forgotten: Whether handles without leases are then unknown, instead of released.
        """
        scope.closed = True
        messages = self._in_scope.pop(scope, {})
        with ExitStack() as ending:  # in the reverse order, and all of it even if some fails
            for message in messages if scope.is_threads else ():
                ending.callback(self._forget_answers, message, scope)
            for message in reversed(messages):
                if count := message.scoped.pop(scope, 0):
                    self._count(message, -count)
                    ending.callback(self.drop_if_unleased, message, forgotten=forgotten)

    def _forget_answers(self, message: Message, scope: Scope) -> None:
        for memo in [memo for memo, owner in message.idempotency_keys.items() if owner is scope]:
            del message.idempotency_keys[memo], self.memos[memo]
        message.sources = [source for source in message.sources if not source.forgotten]

    def leased_in(self, scope: Scope) -> Collection[Message]:
        """Return the messages with leases that a scope counts."""
        return self._in_scope.get(scope, {}).keys()

    def drop_tenant(self, tenant: str) -> None:
        """Drop all leases and pins of a tenant's messages."""
        for message in self.messages(tenant):
            if message.entry is not None:
                self.cache.pin(message.entry, 0)
            while message.leases:
                self.release(message, None)
        for counts in (self._messages, self._leases):
            counts.pop(tenant, None)

    def drop_if_unleased(self, message: Message, *, forgotten: bool = False) -> None:
        """Free a message that has no leases, and thoughts of calls that have none. For `forgotten` see `close`."""
        for thought in message.forget_thoughts():
            if thought.message.leases:  # when a tenant leaves, its leases are dropped in any order
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
        for copy in copies:
            self.release(copy, None, forgotten=forgotten)
        if not forgotten:
            self._released[message.handle.id] = message.tenant
        while len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        self._free_if_unneeded(message)

    def keep(self, holder: Message, dependent: Message | Thought, scope: Scope | None) -> None:
        """Make the lease of a message's copy or thoughts, taken in a scope, the message's own."""
        dependents: list[Any] = holder.thoughts if isinstance(dependent, Thought) else holder.copies
        leased = dependent.message if isinstance(dependent, Thought) else dependent
        self.lease(leased, None)
        self.release(leased, scope)
        if leased is holder or dependent in dependents:
            self.release(leased, None)  # one is enough
        if leased is not holder:
            dependents[:] = [*(item for item in dependents if item != dependent), dependent]  # the latest comes last

    def _add_entry(self, message: Message, segment: Segment | None) -> CacheEntry:
        entry = CacheEntry(message.handle.id, len(message.tokens), message.native_offset, tenant=message.tenant)
        try:
            message.entry = self.cache.hold(entry, segment)
        except BaseException:
            if segment is None and entry in self.cache:  # a segment's entry is dropped by its owner
                self.cache.drop(entry)
            raise
        return entry

    def _count(self, message: Message, more: int) -> None:
        """Change the number of leases on a message."""
        self._messages[message.tenant] += bool(message.leases + more) - bool(message.leases)
        self._leases[message.tenant] += more
        message.leases += more

    def _free_if_unneeded(self, message: Message) -> None:
        if message.entry is not None and not message.leases and not message.entry.wanted:
            self.cache.drop(message.entry)
            message.entry = None

    def counts(self, tenant: str | None) -> tuple[int, int]:
        """Return the numbers of messages and leases, of one tenant or of all."""
        if tenant is None:
            return self._messages.total(), self._leases.total()
        return self._messages[tenant], self._leases[tenant]

    def messages(self, tenant: str | None = None) -> list[Message]:
        """Return the leased messages, of one tenant or of all."""
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


def _is_richer(old: Sequence[SampledToken], new: Sequence[SampledToken]) -> bool:
    """Return whether the old samples of a message are to be kept: the new ones are empty, or the old have
    log-probabilities."""
    return not new or old[0].logprob is not None


def _handle_error(handle: MessageHandle, message: Message | None, released: bool, fingerprint: str) -> HandleError:
    """Return the error for a handle of another model, of another message, released, or unknown."""
    if handle.base_model != fingerprint:
        return ForeignHandleError(
            f"handle {handle.id!r} was made by model {handle.base_model!r}, this engine runs {fingerprint!r}: pass the "
            "text instead and prefill it here"
        )
    if released:
        return ReleasedHandleError(
            f"handle {handle.id!r} was released: its last lease was dropped by release() or the end of a scope. "
            "Prefill or decode it again"
        )
    if message is not None:
        return UnknownHandleError(
            f"handle {handle.id!r} has length={handle.length} and model={handle.model!r}, but was created with "
            f"length={message.handle.length} and model={message.handle.model!r}: pass it unchanged"
        )
    return UnknownHandleError(
        f"handle {handle.id!r} is unknown: this engine never created it, or deleted it with its thread. Handles are "
        "valid in the engine that created them, under its salt: encode the text again"
    )


def require_handle(handle: object) -> MessageHandle:
    """Return the handle; raises `InvalidRequestError` if it is not one."""
    if not isinstance(handle, MessageHandle):
        raise InvalidRequestError(f"expected a MessageHandle, not {handle!r}: use MessageHandle.model_validate")
    return handle


class ChoreoMethod:
    """Method whose calls attend to their parents' own KV."""

    keeps_kv = True
    """True: a prefill encodes, and messages own KV. Of the other method it is False: there messages are text."""

    def __init__(self, table: MessageTable) -> None:
        self._table, self._cache = table, table.cache

    def encoding(self, lineage: Lineage) -> FromCache:
        return FromCache(lineage, self._table)

    def reach(self, lineage: Lineage, added: int) -> int:
        """Return the first position that a call does not touch when it adds `added` tokens."""
        return lineage.placement.end([len(parent.tokens) for parent in lineage.parents], len(lineage.tokens) + added)

    def room(self, lineage: Lineage, added: int) -> int:
        """Return the tokens of KV that must fit at once for it: what it reads, and at most what it writes."""
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
            message = self._table.get(entry.key)
            # Other tenants, and the authors of their messages, are not revealed.
            own = message is not None and message.tenant == tenant
            name = "others" if not own else repr(message.author) if message and message.author else "nobody named"
            by_author[name] += entry.tokens
        authors = ", ".join(f"{author} ({tokens} tokens)" for author, tokens in by_author.most_common(5))
        return f" by {authors}" if authors else ""

    def drop_tenant(self, tenant: str) -> None:
        """Do nothing: the table of messages drops what is cached for a tenant."""

    def check(self) -> None:
        self._cache.check()


class FromCache(Encoding):
    """Encoding of a request over its parents' KV, wherever that is. It wants the parents' entries from the start, so
    that releasing a handle meanwhile does no harm."""

    def __init__(self, lineage: Lineage, table: MessageTable) -> None:
        self.lineage, self.table, self.cache = lineage, table, table.cache
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
                    self.awaited[parent.handle.id], request = self.table.recompute(parent, reader)
                    if request is not None:
                        requests.append(request)
        except BaseException:
            for request in requests:  # nobody may wait for a request that will never run
                request.over = True
                request.owner.abandon(request)
            raise
        return requests

    def awaits(self) -> list[Request]:
        running = (self.table.recomputing.get(message_id) for message_id in self.awaited)
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
                brought = entry.segment
                assert brought is not None
                self.cache.pool.pin(brought)
                self.pinned.append(brought)
        pieces: list[Piece] = []
        placement = self.lineage.placement
        for entry, offset in zip(self.entries, placement.offsets, strict=True):
            segment = self._segment(entry)
            assert segment is not None
            self.cache.touch(entry)
            pieces.append(Piece(segment, 0, entry.tokens, offset))
        return Binding(tuple(pieces), self.lineage.tokens, placement.position, tuple(arrivals))

    def _segment(self, entry: CacheEntry) -> Segment | None:
        """Return the segment of its KV in the pool or, if a request of the same step encodes it, the future one."""
        if entry.key in self.awaited and self.cache.lost(entry):
            under_way = self.table.recomputing.get(entry.key)
            return None if under_way is None else under_way.segment
        return entry.segment

    def unpin(self) -> None:
        arriving, self.arriving = self.arriving, []
        pinned, self.pinned = self.pinned, []
        with ExitStack() as all_of_it:  # whatever fails, the rest is released
            for segment in pinned:
                all_of_it.callback(self.cache.pool.unpin, segment)
            for entry, arrival in arriving:
                if not arrival.is_there:
                    all_of_it.callback(self.cache.withdraw, entry, arrival)

    def close(self, request: Request) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as all_of_it:
            for parent in self.lineage.parents:
                all_of_it.callback(self.table.unwant, parent)
            for future in self.awaited.values():
                all_of_it.callback(future.cancel)


@dataclass(eq=False)
class _Recomputation:
    """Owner of a request that recomputes a message: see `Owner`."""

    table: MessageTable
    message: Message
    first: bool
    """True if a lazy prefill is encoded for the first time, False if memory has lost it."""

    def finish(self, request: Request) -> None:
        self._forget(request)
        table, usage = self.table, Usage.of(request) if self.first else None
        request.encoding.close(request)
        segment = request.hand_over()
        assert segment is not None
        try:
            table.computed(self.message, segment, usage)
        finally:
            if self.message.entry is None or self.message.entry.segment is not segment:
                table.cache.pool.unpin(segment)

    def abandon(self, request: Request) -> None:
        self._forget(request)
        request.give_back(self.table.cache.pool)

    def _forget(self, request: Request) -> None:
        if self.table.recomputing.get(self.message.handle.id) is request:
            del self.table.recomputing[self.message.handle.id]
