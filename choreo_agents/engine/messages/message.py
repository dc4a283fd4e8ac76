"""Messages: lineage and placement of their KV, ids, labels, usage, leases and scopes."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.kv.store import KVKey
from choreo_agents.runtime.request import FinishReason, Request
from choreo_agents.sampling import SampledToken

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Lineage:
    """Everything that a message's KV is computed from, the first time and whenever it was lost.

    For a running decode, as far as it is known: its tokens are the header's.
    """

    tokens: tuple[int, ...]
    parents: tuple[Message, ...] = field(repr=False)
    placement: Placement
    tenant: str = ""
    """Tenant that alone may use it."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the base model."""
    mapper: str = ""
    """Fingerprint of the cache mapper that computes its KV from its one parent's; empty: it is encoded."""

    def at(self, position: int) -> Lineage:
        """Return the lineage moved to another position."""
        offsets = tuple(position + offset for offset in self.placement.relative())
        return replace(self, placement=Placement(offsets, position))

    def label(self, author: str | None, role: str | None, source: Message | None = None) -> str:
        """Return a name of the call: a hash of author, role, length, view, positions and source, without any text.

        It does not depend on which encoding of the source the text comes from: equal calls are one request.
        """
        view = [(parent.label, offset) for parent, offset in zip(self.parents, self.placement.relative(), strict=True)]
        named = (author, role, len(self.tokens), view, None if source is None else source.origin)
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def prompt_tokens(self) -> int:
        """Return the number of tokens of its view and of its own turn, as far as that is given."""
        return sum(len(parent.tokens) for parent in self.parents) + len(self.tokens)

    def text(self) -> tuple[int, ...]:
        """Return the tokens of all parents and its own, concatenated."""
        return tuple(token for parent in self.parents for token in parent.tokens) + self.tokens


@dataclass(frozen=True)
class Placement:
    """Positions of the parents' first tokens and of the new message's."""

    offsets: tuple[int, ...]
    position: int

    def relative(self) -> tuple[int, ...]:
        """Return the parents' offsets relative to the new message."""
        return tuple(offset - self.position for offset in self.offsets)

    def end(self, lengths: Sequence[int], new_length: int) -> int:
        """Return the first position behind all messages."""
        ends = [offset + length for offset, length in zip(self.offsets, lengths, strict=True)]
        return max([*ends, self.position + new_length])


def place(lengths: Sequence[int], offsets: Sequence[int | None] | None, position: int | None) -> Placement:
    """Fill in omitted offsets: each follows the end of the parent before it, the first is 0.

    Args:
        lengths: Tokens of each parent.
        offsets: One entry a parent, None where omitted; or None for all.
        position: Of the new message; None puts it after the last parent.

    Raises:
        InvalidRequestError: A wrong number of offsets, or a negative one.
    """
    if offsets is not None and len(offsets) != len(lengths):
        raise InvalidRequestError(f"got {len(lengths)} parents but {len(offsets)} offsets: pass one for each")
    placed: list[int] = []
    following = 0
    for i, length in enumerate(lengths):
        offset = None if offsets is None else offsets[i]
        placed.append(require_position(f"offsets[{i}]", following if offset is None else offset))
        following = placed[-1] + length
    return Placement(tuple(placed), require_position("position", following if position is None else position))


def require_position(name: str, offset: int) -> int:
    """Return a position that a caller has given; raises `InvalidRequestError` if it is invalid."""
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise InvalidRequestError(f"{name} must be a position of 0 or more, not {offset!r}")
    return offset


@dataclass(eq=False)
class Message:
    """A message. It refers to its parents, so that lineage lives as long as any descendant."""

    handle: MessageHandle
    lineage: Lineage
    author: str | None
    """First author."""
    role: str | None
    usage: Usage
    label: str = ""
    """Label of the request that made it."""
    origin: str = ""
    """Label of the request that first made the message whose text this is."""
    chosen: tuple[SampledToken, ...] | None = None
    """Sampled tokens, if it was decoded: all but its header and turn suffix. None: it was prefilled."""
    header: int = 0
    """Number of its tokens before the sampled ones."""
    finish_reason: FinishReason | None = None
    """Finish reason of its last decode; None: it was prefilled."""
    promise: int | None = None
    """Number of the request that will encode it for its first reader, until it is encoded; None afterwards."""
    again: bool = False
    """Whether its text was encoded before and lost."""
    entry: CacheEntry | None = None
    """Cache entry of its KV while it is leased or a request wants it; else None, as always under a method that keeps
    text only."""
    leases: int = 0
    scoped: Counter[Scope] = field(default_factory=Counter)
    """Number of leases that end with each scope."""
    forgotten: bool = False
    """Whether its last lease ended with the thread that had it: callers that have its text may encode it again."""
    idempotency_keys: dict[str, Scope | None] = field(default_factory=dict)
    """Idempotency keys of the calls that it answers, with the scope of the thread that made each."""
    authors: set[str] = field(default_factory=set)
    """All authors: equal text at an equal place is one message."""
    marked: bool = False
    """Whether a call marked it confidential."""
    is_thought: bool = False
    """Whether it was decoded with thoughts."""
    sources: list[Message] = field(default_factory=list)
    """Messages whose text was encoded again as this one."""
    foreign: list[MessageHandle] = field(default_factory=list)
    """Messages of other models whose text was encoded here as this one."""
    copies: list[Message] = field(default_factory=list)
    """Mapped copies of it, each with a lease for as long as it has any."""
    thoughts: list[Thought] = field(default_factory=list)
    """Thoughts before it, call by call: at most as many as it has leases, each with a lease itself."""

    def remembered(self) -> dict[str, Any]:
        """Return a snapshot of all its state that may change."""
        return {name: item.copy() if isinstance(item, dict | set | list) else item for name, item in vars(self).items()}

    @property
    def confidential(self) -> bool:
        """True if audits treat it as confidential, as they do all thoughts."""
        return self.marked or self.is_thought

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.lineage.tokens

    @property
    def parents(self) -> tuple[Message, ...]:
        return self.lineage.parents

    @property
    def relative_offsets(self) -> tuple[int, ...]:
        """Offsets of the parents relative to its first token."""
        return self.lineage.placement.relative()

    @property
    def native_offset(self) -> int:
        """Position at which its KV was encoded; under a method that keeps text only, where its call placed it."""
        return self.lineage.placement.position

    @property
    def tenant(self) -> str:
        return self.lineage.tenant

    def kv_key(self) -> KVKey:
        """Return the key of its KV. Call it under the engine's lock."""
        at = self.native_offset if self.entry is None else self.entry.native_offset
        pairs = zip(self.parents, self.relative_offsets, strict=True)
        parents = tuple((parent.handle.id, offset) for parent, offset in pairs)
        return KVKey(self.handle.id, self.handle.model, self.tokens, parents, at)

    def leases_within(self, scope: Scope | None) -> int:
        """Return the number of leases that last as long as a scope: its own, those of scopes around it, and unscoped
        ones.

        A thread relies on its own leases only.
        """
        if scope is not None and scope.is_threads:
            return self.scoped[scope]
        around = set() if scope is None else set(scope.chain())
        return self.leases - sum(count for holder, count in self.scoped.items() if holder not in around)

    def leased_only_within(self, scope: Scope) -> bool:
        """Return whether all its leases end with a scope, or with one inside it."""
        inside = sum(count for holder, count in self.scoped.items() if scope in holder.chain())
        return self.leases == inside + (self.is_kept() and self.parents[0].leased_only_within(scope))

    def is_kept(self) -> bool:
        """Return whether it is a mapped copy with a lease of its source."""
        return bool(self.lineage.mapper) and self in self.parents[0].copies

    def forget_thoughts(self) -> list[Thought]:
        """Remove and return thoughts of calls that have dropped their leases: in each scope, the latest."""
        remaining: Counter[Scope | None] = Counter(self.scoped)
        remaining[None] = self.leases - self.scoped.total()
        current: list[Thought] = []
        forgotten: list[Thought] = []
        for thought in self.thoughts:
            remaining[thought.scope] -= 1
            (forgotten if remaining[thought.scope] < 0 else current).append(thought)
        self.thoughts = current
        return forgotten

    def check(self) -> None:
        """Assert that a leased message's leases, copies, thoughts and entry agree."""
        assert self.leases > 0 and not self.forgotten and self.handle.length == len(self.tokens)
        assert self.scoped.total() <= self.leases and not any(scope.closed for scope in self.scoped)
        assert all(copy.parents == (self,) and copy.leases > 0 for copy in self.copies)
        assert len(set(self.copies)) == len(self.copies) and len(self.thoughts) <= self.leases
        if self.entry is not None:
            assert self.entry.key == self.handle.id and self.entry.tokens == len(self.tokens)

    def unknown(self, is_known: Callable[[Message], bool]) -> Iterator[Message]:
        """Yield it and its ancestors as `parents_first` does."""
        return parents_first(self, lambda message: message.parents, is_known)

    def ancestors(self) -> Iterator[Message]:
        """Yield each message that its KV has ever attended to once, nearest first."""
        visited = {self.handle.id}
        queue = list(self.parents)
        for message in queue:
            if message.handle.id not in visited:
                visited.add(message.handle.id)
                queue.extend(message.parents)
                yield message


def parents_first(start: T, parents_of: Callable[[T], Iterable[T]], is_known: Callable[[T], bool]) -> Iterator[T]:
    """Yield a message and its ancestors, parents first, as far as `is_known` is false; the caller must make each known.
    Iteratively, since a conversation may be long."""
    waiting = [(start, iter(parents_of(start)))]
    while waiting:
        message, parents = waiting[-1]
        # One parent at a time: a message that attends to a long history shares most of it with the next.
        above = None if is_known(message) else next((parent for parent in parents if not is_known(parent)), None)
        if above is not None:
            waiting.append((above, iter(parents_of(above))))
        else:
            waiting.pop()
            if not is_known(message):
                yield message


@dataclass(frozen=True)
class Thought:
    """Thoughts before a message, of one call that has a lease of the message."""

    message: Message
    """Thoughts and answer, as decoded."""
    call: str | None
    """Idempotency key of the call."""
    scope: Scope | None
    """Scope in which the lease was taken."""


def thinker(author: str) -> str:
    """Return the author of an author's thoughts."""
    return f"{author}.thoughts"


class MessageIds:
    """Ids and keys of one tenant's messages.

    Args:
        salt: The tenant's secret; without one, ids are unique to this engine.
        model: Fingerprint of the model.
        secret: The engine's secret.
    """

    def __init__(self, salt: str, model: str, secret: bytes) -> None:
        # Without a salt the engine's secret takes its place: a key of the empty salt could be derived by anyone.
        self.salt = salt or secret.hex()
        """Salt with which another engine has the same ids: only for a process that serves this tenant."""
        self._key = hmac.digest(b"choreo", self.salt.encode(), "sha256")
        self._lasting_key = hmac.digest(b"choreo", salt.encode(), "sha256")
        self._lasting: WeakKeyDictionary[Message, str] = WeakKeyDictionary()
        self._model = model
        self.salted = bool(salt)
        """Whether other processes with the salt have the same ids."""
        self.tenant = hashlib.sha256(self._key).hexdigest()[:16]
        """Name of the tenant; does not reveal the salt."""
        self.seal = hmac.digest(self._key, b"files", "sha256")
        """Key that signs the tenant's files."""
        self.seals = Seals(self._key, salted=self.salted)
        """Codes for content that leaves the engine."""

    def encoder(self, adapter: str = "", mapper: str = "") -> str:
        """Return the fingerprint of what computes KV: the model, with an adapter or a mapper if there is one."""
        return self._model + (f"+{adapter}" if adapter else "") + (f"~{mapper}" if mapper else "")

    def handle(self, lineage: Lineage) -> MessageHandle:
        """Return the handle of the message that a lineage makes."""
        named = self._named(self._key, lineage, [parent.handle.id for parent in lineage.parents])
        encoder = self.encoder(lineage.adapter, lineage.mapper)
        return MessageHandle(id=named, model=encoder, length=len(lineage.tokens))

    def lasting(self, lineage: Lineage) -> str:
        """Return an id of a lineage that is the same in each run of a program, even without a salt: seeds derive from
        it.

        It finds no messages.
        """
        if self.salted:
            return self.handle(lineage).id
        for parent in lineage.parents:
            for message in parent.unknown(self._lasting.__contains__):
                self._lasting[message] = self._lastingly(message.lineage)
        return self._lastingly(lineage)

    def _lastingly(self, lineage: Lineage) -> str:
        return self._named(self._lasting_key, lineage, [self._lasting[parent] for parent in lineage.parents])

    def _named(self, key: bytes, lineage: Lineage, parents: Sequence[str]) -> str:
        encoder, placement = self.encoder(lineage.adapter, lineage.mapper), lineage.placement
        return message_id(key, encoder, lineage.tokens, parents, placement.relative())

    def key(
        self, tokens: tuple[int, ...], parents: Sequence[MessageHandle], offsets: Sequence[int], at: int, adapter: str
    ) -> KVKey:
        """Return the key of the KV of tokens at a position after parents, whether or not that KV exists.

        Args:
            tokens: Tokens of the message.
            parents: Messages it attends to.
            offsets: Position of each parent.
            at: Position of its first token.
            adapter: Fingerprint of the adapter that encodes it; empty: the base model.
        """
        encoder, ids = self.encoder(adapter), [parent.id for parent in parents]
        relative = [offset - at for offset in offsets]
        named = message_id(self._key, encoder, tokens, ids, relative)
        return KVKey(named, encoder, tokens, tuple(zip(ids, relative, strict=True)), at)


@dataclass(frozen=True)
class Usage:
    """Cost of a call: every token that the engine encodes is charged to one call.

    A lazy prefill costs nothing: its tokens are charged to the call that reads it first; of several in one step, to the
    first submitted.
    """

    tokens_encoded: int
    """Tokens encoded for it for the first time, its own turn included."""
    tokens_reused: int
    """Tokens of its view that it found encoded."""
    ttft_s: float | None
    """Seconds from the decode's submission to its first token; None for a prefill, and where nothing was sampled. Under
    choreo its parents were encoded before, by calls of their own, unless these were lazy."""
    duration_s: float
    tokens_recomputed: int = 0
    """Tokens encoded again for it after memory had lost them."""
    tokens_outside_view: int = 0
    """Of those encoded and recomputed, tokens in messages outside its view: ancestors of its parents, and messages that
    came too late to join it."""
    tokens_mapped: int = 0
    """Tokens of a mapped copy, which nothing encodes."""
    tokens_of_other_models: int = 0
    """Of those encoded, tokens in messages whose text another model generated, whose KV it cannot use."""
    queued_s: float | None = None
    """Seconds from its submission until a step could hold it; None where no step did."""

    @classmethod
    def of(cls, request: Request) -> Usage:
        """Return the cost of a request that ends now."""
        ttft = None if request.first_token_s is None else request.first_token_s - request.submitted_s
        return cls(
            tokens_reused=request.reused,
            ttft_s=ttft,
            duration_s=time.perf_counter() - request.submitted_s,
            tokens_outside_view=request.tokens_outside_view,
            queued_s=None if request.begun_s is None else request.begun_s - request.submitted_s,
            **request.charges,
        )

    @classmethod
    def of_existing(cls, tokens: int) -> Usage:
        """Return the cost of a call whose message existed already."""
        return cls(0, tokens, None, 0.0)

    def with_answer(self, encoded: Usage) -> Usage:
        """Return the cost of thinking and answering together with that of encoding the answer."""
        both = ("tokens_encoded", "duration_s", "tokens_recomputed", "tokens_outside_view", "tokens_of_other_models")
        return replace(self, **{name: getattr(self, name) + getattr(encoded, name) for name in both})

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its view and its own turn, each once: encoded, reused or recomputed.

        The text methods do not encode the last token that a decode samples, and do not count it.
        """
        computed = self.tokens_encoded + self.tokens_recomputed + self.tokens_mapped - self.tokens_outside_view
        return computed + self.tokens_reused


@dataclass(eq=False)
class Scope:
    """A `with engine.scope():` block, whose leases end together. Each message counts the leases taken in it.

    Threads and tasks started inside inherit it where they copy the context, as asyncio and LangGraph do.
    """

    outer: Scope | None
    closed: bool = False
    is_threads: bool = False
    """Whether it is a thread's (see `ThreadLeases`), which has its own lease of everything it reads."""

    @staticmethod
    def current(owner: object) -> Scope | None:
        """Return the innermost open scope of an owner in this context; a task may outlive the one it started in."""
        scope = _innermost.get({}).get(owner)
        return None if scope is None else next((open_ for open_ in scope.chain() if not open_.closed), None)

    @contextmanager
    def entered(self, owner: object) -> Iterator[Scope]:
        """Make it the owner's innermost scope for a block."""
        token = _innermost.set({**_innermost.get({}), owner: self})
        try:
            yield self
        finally:
            # Left in another context, as generator fixtures may be: the block's own context has ended with it.
            with suppress(ValueError):
                _innermost.reset(token)

    def chain(self) -> Iterator[Scope]:
        """Yield this scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


_innermost: ContextVar[dict[object, Scope]] = ContextVar("choreo_scopes")
"""Innermost open scope by owner, in this context; replaced, never changed."""
