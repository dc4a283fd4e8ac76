"""Messages: from what their KV is computed and where it stands, who keeps them, what they are called and cost."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.kv.store import KVKey
from choreo_agents.runtime.request import FinishReason, Request
from choreo_agents.sampling import SampledToken

_THOUGHTS = ".thoughts"


@dataclass(frozen=True, eq=False)
class Lineage:
    """From which a message's KV is computed, the first time and whenever it was lost.

    Of a decode under way, as far as it is known: its tokens are the header's.
    """

    tokens: tuple[int, ...]
    parents: tuple[Message, ...] = field(repr=False)
    placement: Placement
    tenant: str = ""
    """Who alone may use it."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the model alone."""
    mapper: str = ""
    """Fingerprint of the cache mapper that makes its KV of its one parent's; empty: it is encoded."""

    def at(self, position: int) -> Lineage:
        """The same, encoded from another position on."""
        offsets = tuple(position + offset for offset in self.placement.relative())
        return replace(self, placement=Placement(offsets, position))

    def label(self, author: str | None, role: str | None, source: Message | None = None) -> str:
        """Names the call by who makes it, how long it is, what it sees where and whose words it encodes again.

        It holds no words. Which encoding they are taken from is left out: calls that ask for the same are one request.
        """
        seen = [(parent.label, offset) for parent, offset in zip(self.parents, self.placement.relative(), strict=True)]
        named = (author, role, len(self.tokens), seen, None if source is None else source.origin)
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def prompt_tokens(self) -> int:
        """Of its view and its own turn, as far as that is given."""
        return sum(len(parent.tokens) for parent in self.parents) + len(self.tokens)

    def text(self) -> tuple[int, ...]:
        """The tokens of the parents and its own, one after the other."""
        return tuple(token for parent in self.parents for token in parent.tokens) + self.tokens


@dataclass(frozen=True)
class Placement:
    """Positions of the parents' first tokens and of the new message's."""

    offsets: tuple[int, ...]
    position: int

    def relative(self) -> tuple[int, ...]:
        """The parents' offsets as seen from the new message."""
        return tuple(offset - self.position for offset in self.offsets)

    def end(self, lengths: Sequence[int], new_length: int) -> int:
        """The first position that nothing reaches."""
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
        raise InvalidRequestError(f"there are {len(lengths)} parents but {len(offsets)} offsets: give one for each")
    placed: list[int] = []
    following = 0
    for i, length in enumerate(lengths):
        offset = None if offsets is None else offsets[i]
        placed.append(require_position(f"offsets[{i}]", following if offset is None else offset))
        following = placed[-1] + length
    return Placement(tuple(placed), require_position("position", following if position is None else position))


def require_position(name: str, offset: int) -> int:
    """A position that a caller has named; raises `InvalidRequestError` unless it is one."""
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise InvalidRequestError(f"{name} must be a position of 0 or more, not {offset!r}")
    return offset


@dataclass(eq=False)
class Message:
    """One message. It refers to its parents, so that lineage lives as long as any descendant does."""

    handle: MessageHandle
    lineage: Lineage
    author: str | None
    """Who said it first."""
    role: str | None
    usage: Usage
    label: str = ""
    """What the request that made it was called."""
    origin: str = ""
    """What the request was called that first made the message whose words these are."""
    chosen: tuple[SampledToken, ...] | None = None
    """What was sampled, if it was decoded: less than all tokens by the header and what closed it. None: prefilled."""
    header: int = 0
    """How many of its tokens came before these."""
    finish_reason: FinishReason | None = None
    """Why the decode that made it last has ended; None: prefilled."""
    promise: int | None = None
    """As long as nobody has encoded it: the number of the request that will, for whoever reads it first."""
    again: bool = False
    """Whether its words were encoded before, and are lost."""
    entry: CacheEntry | None = None
    """Where its KV is while it is leased or a request wants it; None else, and always under a method that keeps text
    only."""
    leases: int = 0
    scoped: Counter[Scope] = field(default_factory=Counter)
    """Which of the leases end with a scope."""
    forgotten: bool = False
    """Whether its last lease went with the thread that had it: whoever has its words may encode them again."""
    idempotency_keys: dict[str, Scope | None] = field(default_factory=dict)
    """The calls that it answers, and which thread's they are."""
    authors: set[str] = field(default_factory=set)
    """All who said it: equal words in an equal place are one message."""
    marked: bool = False
    """Whether any of them marked it confidential."""
    is_thought: bool = False
    """Whether it was decoded to think an answer out."""
    sources: list[Message] = field(default_factory=list)
    """The messages whose words were encoded again as this one."""
    foreign: list[MessageHandle] = field(default_factory=list)
    """The messages of other models whose words were encoded here as this one."""
    copies: list[Message] = field(default_factory=list)
    """Mapped copies of it, which have a lease for as long as it has any."""
    thoughts: list[Thought] = field(default_factory=list)
    """What was thought before it was said, call by call: no more of them than it has leases, and each has one, too."""

    def remembered(self) -> dict[str, Any]:
        """All that may change of it, as it is now."""
        return {name: each.copy() if isinstance(each, dict | set | list) else each for name, each in vars(self).items()}

    @property
    def confidential(self) -> bool:
        """As audits tell it: thoughts are whether or not anybody marked them so."""
        return self.marked or self.is_thought

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.lineage.tokens

    @property
    def parents(self) -> tuple[Message, ...]:
        return self.lineage.parents

    @property
    def relative_offsets(self) -> tuple[int, ...]:
        """Where parents appear, as seen from its first token."""
        return self.lineage.placement.relative()

    @property
    def native_offset(self) -> int:
        """Where its KV was encoded; under a method that keeps text only, where its call placed it."""
        return self.lineage.placement.position

    @property
    def tenant(self) -> str:
        return self.lineage.tenant

    def leases_within(self, scope: Scope | None) -> int:
        """Leases that last as long as a scope does: its own, those of scopes around it, and those of none.

        On those of others a thread does not rely.
        """
        if scope is not None and scope.is_threads:
            return self.scoped[scope]
        around = set() if scope is None else set(scope.chain())
        return self.leases - sum(count for held, count in self.scoped.items() if held not in around)

    def leased_only_within(self, scope: Scope) -> bool:
        """Whether all its leases end with a scope, or with one inside of it."""
        inside = sum(count for held, count in self.scoped.items() if scope in held.chain())
        return self.leases == inside + (self.is_kept() and self.parents[0].leased_only_within(scope))

    def is_kept(self) -> bool:
        """Whether it is a mapped copy that has the lease of its source."""
        return bool(self.lineage.mapper) and self in self.parents[0].copies

    def forget_thoughts(self) -> list[Thought]:
        """Forget what was thought by calls that have given back their leases: of each scope, the latest."""
        left: Counter[Scope | None] = Counter(self.scoped)
        left[None] = self.leases - self.scoped.total()
        kept: list[Thought] = []
        forgotten: list[Thought] = []
        for thought in self.thoughts:
            left[thought.scope] -= 1
            (forgotten if left[thought.scope] < 0 else kept).append(thought)
        self.thoughts = kept
        return forgotten

    def forget(self, scope: Scope) -> list[str]:
        """Leave out what it has answered in a scope. Returns the calls."""
        memos = [memo for memo, whose in self.idempotency_keys.items() if whose is scope]
        for memo in memos:
            del self.idempotency_keys[memo]
        self.sources = [each for each in self.sources if not each.forgotten]
        return memos

    def check(self) -> None:
        """Assert that a leased message's leases, and what it keeps, agree."""
        assert self.leases > 0 and not self.forgotten and self.handle.length == len(self.tokens)
        assert self.scoped.total() <= self.leases and not any(scope.closed for scope in self.scoped)
        assert all(copy.parents == (self,) and copy.leases > 0 for copy in self.copies)
        assert len(set(self.copies)) == len(self.copies) and len(self.thoughts) <= self.leases
        if self.entry is not None:
            assert self.entry.key == self.handle.id and self.entry.tokens == len(self.tokens)

    def unknown(self, is_known: Callable[[Message], bool]) -> Iterator[Message]:
        """It and what it was encoded from, parents first, as far as that is not known: whoever is given one knows it
        then. No recursion: a conversation may be long."""
        waiting = [(self, iter(self.parents))]
        while waiting:
            message, parents = waiting[-1]
            # One parent at a time: who attends to all that was said before has most of it in common with the next.
            above = None if is_known(message) else next((each for each in parents if not is_known(each)), None)
            if above is not None:
                waiting.append((above, iter(above.parents)))
            else:
                waiting.pop()
                if not is_known(message):
                    yield message

    def ancestors(self) -> Iterator[Message]:
        """All that its encoding has ever attended to, nearest first, each once."""
        seen = {self.handle.id}
        queue = list(self.parents)
        for message in queue:
            if message.handle.id not in seen:
                seen.add(message.handle.id)
                queue.extend(message.parents)
                yield message


@dataclass(frozen=True)
class Thought:
    """What was thought before a message was said, by one call that has a lease of that."""

    message: Message
    """Thoughts and answer, as they were decoded."""
    call: str | None
    """The call's idempotency key."""
    scope: Scope | None
    """In which the lease was taken."""


@dataclass(frozen=True)
class Label:
    """What one call says about the message that it asks for."""

    author: str | None
    confidential: bool
    source: Message | None
    foreign: MessageHandle | None = None
    """In place of a source, the message of another model whose words these are."""
    is_thought: bool = False
    """Whether the call thinks: what it decodes is nobody's answer."""

    def origin(self, label: str) -> str:
        """See `Message.origin`; `label`: what the request is called."""
        return label if self.source is None else self.source.origin

    def put_on(self, message: Message) -> None:
        """Add it to what others said about the same message."""
        if self.author is not None:
            message.authors.add(self.author)
        message.marked = message.marked or self.confidential
        message.is_thought = message.is_thought or self.is_thought
        if self.source is not None and self.source is not message and self.source not in message.sources:
            # Nobody may lease it, and every run find it again: sources that are forgotten must not add up.
            kept = [each for each in message.sources if not each.forgotten]
            message.sources = [*kept, self.source]
        if self.foreign is not None and self.foreign not in message.foreign:
            message.foreign.append(self.foreign)


def thinker(author: str) -> str:
    """The author of what somebody thinks before it speaks."""
    return f"{author}{_THOUGHTS}"


def who_thinks(author: str) -> str:
    """Who it is that thinks what has this author."""
    return author.removesuffix(_THOUGHTS)


class MessageIds:
    """Of one tenant.

    Args:
        salt: The tenant's secret; without one, its names are this engine's alone.
        model: Fingerprint of the model.
        secret: The engine's.
    """

    def __init__(self, salt: str, model: str, secret: bytes) -> None:
        # What is made of the salt alone anybody can make who guesses that there is none.
        self.salt = salt or secret.hex()
        """Under which another engine gives the same names: for whoever serves the tenant elsewhere, and nobody else."""
        self._key = hmac.digest(b"choreo", self.salt.encode(), "sha256")
        self._lasting_key = hmac.digest(b"choreo", salt.encode(), "sha256")
        self._lasting: WeakKeyDictionary[Message, str] = WeakKeyDictionary()
        self._model = model
        self.salted = bool(salt)
        """Whether other processes give the same names."""
        self.tenant = hashlib.sha256(self._key).hexdigest()[:16]
        """Names the tenant; does not tell the salt."""
        self.seal = hmac.digest(self._key, b"files", "sha256")
        """Signs the tenant's files."""
        self.seals = Seals(self._key, salted=self.salted)
        """Of what is said."""

    def encoder(self, adapter: str = "", mapper: str = "") -> str:
        """Fingerprint of what makes KV: the model, with an adapter or a mapper if it has one."""
        return self._model + (f"+{adapter}" if adapter else "") + (f"~{mapper}" if mapper else "")

    def handle(self, lineage: Lineage) -> MessageHandle:
        """Of the message that a lineage makes."""
        named = self._named(self._key, lineage, [parent.handle.id for parent in lineage.parents])
        encoder = self.encoder(lineage.adapter, lineage.mapper)
        return MessageHandle(id=named, model=encoder, length=len(lineage.tokens))

    def lasting(self, lineage: Lineage) -> str:
        """What tells a lineage from others in each run of a program alike, also without a salt: seeds come of it.

        Nothing is found by it.
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
        """What names the KV of tokens at a position after parents, whether or not there are such.

        Args:
            tokens: Its own.
            parents: What it attends to.
            offsets: Where each of them appears.
            at: The position of its first token.
            adapter: Fingerprint of the adapter that encodes it; empty: the model alone.
        """
        encoder, ids = self.encoder(adapter), [parent.id for parent in parents]
        relative = [offset - at for offset in offsets]
        named = message_id(self._key, encoder, tokens, ids, relative)
        return KVKey(named, encoder, tokens, tuple(zip(ids, relative, strict=True)), at)


@dataclass(frozen=True)
class Usage:
    """Every token that the engine encodes is charged to one call.

    A lazy prefill costs nothing: what it promised is charged to the call that reads it first; of several that do so
    in one step, to the one submitted first.
    """

    tokens_encoded: int
    """Tokens encoded for it for the first time, its own turn included."""
    tokens_reused: int
    """Tokens that its view holds and that it found encoded."""
    ttft_s: float | None
    """Seconds from the decode's submission to its first token; None for a prefill, and where nothing was sampled. Under
    choreo its parents were encoded before, by calls of their own, unless these were lazy."""
    duration_s: float
    tokens_recomputed: int = 0
    """Tokens encoded again for it since memory had lost them."""
    tokens_outside_view: int = 0
    """Of those encoded and recomputed, in messages that its view does not hold: what its parents had attended to, and
    what came too late to join it."""
    tokens_mapped: int = 0
    """Of a mapped copy: its own tokens, which nothing encodes."""
    tokens_of_other_models: int = 0
    """Of those encoded: in messages whose words another model had said, of which it has no encoding to hand on."""
    queued_s: float | None = None
    """Seconds from its submission until a step could hold it; None where no step did."""

    @classmethod
    def of(cls, request: Request) -> Usage:
        """What a request that ends now has cost."""
        ttft = None if request.first_token_s is None else request.first_token_s - request.submitted_s
        return cls(
            tokens_reused=request.reused,
            ttft_s=ttft,
            duration_s=time.perf_counter() - request.submitted_s,
            tokens_outside_view=request.beyond,
            queued_s=None if request.begun_s is None else request.begun_s - request.submitted_s,
            **request.charges,
        )

    @classmethod
    def of_existing(cls, tokens: int) -> Usage:
        """What a call has cost whose message was there already."""
        return cls(0, tokens, None, 0.0)

    @property
    def prompt_tokens(self) -> int:
        """What its view held and its own turn, once each: encoded, reused or recomputed.

        The text methods do not encode the last token that a decode samples, and do not count it.
        """
        made = self.tokens_encoded + self.tokens_recomputed + self.tokens_mapped - self.tokens_outside_view
        return made + self.tokens_reused


@dataclass(eq=False)
class Scope:
    """A `with engine.scope():` block, whose leases end together. Each message counts those that were taken in it.

    Threads and tasks started inside inherit it where they copy the context, as asyncio and LangGraph do.
    """

    outer: Scope | None
    closed: bool = False
    is_threads: bool = False
    """Whether it is a thread's (see `ThreadLeases`), which has a lease of its own of all that it reads."""

    @staticmethod
    def current(whose: object) -> Scope | None:
        """The innermost open scope of a tenant in this context; a task may outlive the one it started in."""
        scope = _innermost.get({}).get(whose)
        return None if scope is None else next((open_ for open_ in scope.chain() if not open_.closed), None)

    @contextmanager
    def entered(self, whose: object) -> Iterator[Scope]:
        """A block in which it is a tenant's innermost one."""
        token = _innermost.set({**_innermost.get({}), whose: self})
        try:
            yield self
        finally:
            # Left in another context, as fixtures that are generators may be: the block's own has ended with it.
            with suppress(ValueError):
                _innermost.reset(token)

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


_innermost: ContextVar[dict[object, Scope]] = ContextVar("choreo_scopes")
"""The innermost open scope by whose it is, in this context; replaced, never changed."""
