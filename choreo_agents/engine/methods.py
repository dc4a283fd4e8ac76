"""Three ways to serve the same calls: from the cache, or from re-encoded text with or without a prefix cache.

    choreo      a decode attends to its parents' own encodings, each shown where the view puts it
    baseline    a decode re-encodes its parents' text, less the longest prefix already encoded
    naive       a decode re-encodes all of it

The last two are the twins of Prompt Choreography, section 3.1: prefill only stores text, and offsets are ignored.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from choreo_agents.engine.arrivals import Arrivals
from choreo_agents.engine.ledger import Message
from choreo_agents.engine.placement import Placement
from choreo_agents.engine.restoring import FromCache, Restorer
from choreo_agents.engine.settings import MethodName
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.prefix_tree import PrefixMatch, PrefixTree
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.request import Binding, Encoding, Request


@dataclass(frozen=True)
class Job:
    """A call with its parents found and placed."""

    tokens: tuple[int, ...]
    """Of a prefill's content or a decode's header."""
    parents: tuple[Message, ...]
    placement: Placement
    tenant: str = ""
    """Whose it is."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the model alone."""
    mapper: str = ""
    """Fingerprint of the cache mapper that makes its KV of its one parent's; empty: it is encoded."""

    def label(self, author: str | None, role: str | None, source: Message | None = None) -> str:
        """Names the call by who makes it, what it sees where and what it encodes again, not by any words."""
        seen = [(parent.label, offset) for parent, offset in zip(self.parents, self.placement.relative(), strict=True)]
        named = (author, role, seen, None if source is None else source.label)
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def prompt_tokens(self) -> int:
        """Of its view and its own turn, as far as that is given."""
        return sum(len(parent.tokens) for parent in self.parents) + len(self.tokens)

    def text(self) -> tuple[int, ...]:
        """The tokens of the parents and of the job, one after the other."""
        return tuple(token for parent in self.parents for token in parent.tokens) + self.tokens


class Method(Protocol):
    """Decides what a call encodes and reuses."""

    name: MethodName
    keeps_kv: bool
    """Whether prefill encodes and messages own KV; otherwise they are text."""

    def encoding(self, job: Job) -> Encoding: ...

    def reach(self, job: Job, added: int) -> int:
        """The first position that the job does not touch when it adds `added` tokens."""
        ...

    def room(self, job: Job, added: int) -> int:
        """Tokens of KV that must be there at once for it: what it reads, and at most what it writes."""
        ...

    def evictable_tokens(self) -> int: ...

    def evict(self, tokens: int) -> None: ...

    def pinned(self, tenant: str) -> str: ...

    def drop_tenant(self, tenant: str) -> None:
        """Give up what is cached for a tenant."""
        ...

    def check(self) -> None: ...


class ChoreoMethod:
    """Calls attend to their parents' own encodings."""

    name: MethodName = "choreo"
    keeps_kv = True

    def __init__(self, restorer: Restorer) -> None:
        self._restorer = restorer
        self._memory = restorer.memory

    def encoding(self, job: Job) -> Encoding:
        return FromCache(job.tokens, job.parents, job.placement, self._restorer)

    def reach(self, job: Job, added: int) -> int:
        return job.placement.end([len(parent.tokens) for parent in job.parents], len(job.tokens) + added)

    def room(self, job: Job, added: int) -> int:
        parents = {parent.handle.id: len(parent.tokens) for parent in job.parents}
        own = len(job.tokens) + added
        return sum(self._memory.pool.rounded(length) for length in (*parents.values(), own))

    def evictable_tokens(self) -> int:
        return self._memory.evictable_tokens()

    def evict(self, tokens: int) -> None:
        self._memory.evict(tokens)

    def pinned(self, tenant: str) -> str:
        by_author: Counter[str] = Counter()
        for holding in self._memory.pinned():
            message = self._restorer.ledger.get(holding.key)
            # Who else there is, and what their messages are called, is no tenant's business.
            own = message is not None and message.tenant == tenant
            name = "others" if not own else repr(message.author) if message and message.author else "nobody named"
            by_author[name] += holding.tokens
        said = ", ".join(f"{author} ({tokens} tokens)" for author, tokens in by_author.most_common(5))
        return f" by {said}" if said else ""

    def drop_tenant(self, tenant: str) -> None: ...  # the table of messages does

    def check(self) -> None:
        self._memory.check()


class TextMethod:
    """Calls re-encode their parents' text.

    Args:
        pool: Where encodings live while they are needed, or cached.
        prefix_cache: Keep everything that was encoded, and reuse the longest prefix a prompt shares with it.
    """

    keeps_kv = False

    def __init__(self, pool: KVPool, *, prefix_cache: bool) -> None:
        self.name: MethodName = "baseline" if prefix_cache else "naive"
        self._pool = pool
        self._tree = PrefixTree(pool) if prefix_cache else None

    def encoding(self, job: Job) -> Encoding:
        # What one adapter has encoded is no prefix for another.
        return _FromText(job.text(), self._pool, self._tree, f"{job.tenant} {job.adapter}")

    def reach(self, job: Job, added: int) -> int:
        return len(job.text()) + added

    def room(self, job: Job, added: int) -> int:
        return self._pool.rounded(len(job.text()) + added)

    def evictable_tokens(self) -> int:
        return 0 if self._tree is None else self._tree.evictable_tokens()

    def evict(self, tokens: int) -> None:
        if self._tree is not None:
            self._tree.evict(tokens)

    def pinned(self, tenant: str) -> str:
        return ""

    def drop_tenant(self, tenant: str) -> None:
        if self._tree is not None:
            self._tree.drop(lambda whose: whose.partition(" ")[0] == tenant)

    def check(self) -> None:
        if self._tree is not None:
            self._tree.check()


class _FromText:
    def __init__(self, text: tuple[int, ...], pool: KVPool, tree: PrefixTree | None, tenant: str) -> None:
        self.text = text
        self.tenant = tenant
        self.pool = pool
        self.tree = tree
        # The last token is always encoded: its logits give the first sample.
        self.longest = len(text) - 1

    def first(self, reader: Request) -> Sequence[Request]:
        return ()

    def awaits(self) -> Sequence[Request]:
        return ()

    def after(self) -> Sequence[Request]:
        return ()

    def claimed_tokens(self, counted: set[object]) -> int:
        return 0

    def ready(self) -> bool:
        if self.tree is None:
            return True
        match = self.tree.match(self.text, self.longest, self.tenant)
        return match.promised == match.encoded

    def prompt_tokens(self) -> int:
        reused = 0 if self.tree is None else self.tree.match(self.text, self.longest, self.tenant).encoded
        return len(self.text) - reused

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        self.match = PrefixMatch((), 0, 0)
        if self.tree is not None and reuse:
            self.match = self.tree.match(self.text, self.longest, self.tenant)
        for piece in self.match.pieces:
            self.pool.pin(piece.segment)
        return 0, len(self.text) - self.match.encoded

    def bind(self) -> Binding:
        return Binding(self.match.pieces, self.text[self.match.encoded :], self.match.encoded)

    def bound(self, segment: Segment) -> None:
        if self.tree is not None:
            self.tree.insert(self.text, segment, self.tenant)

    def grow(self, reader: Request) -> tuple[Sequence[Piece], Sequence[Request]]:
        return (), ()  # nothing can be put into the middle of a text that is half encoded

    def unpin(self) -> None:
        for piece in self.match.pieces:
            self.pool.unpin(piece.segment)

    def close(self, request: Request) -> Segment | None:
        if request.segment is None:
            return None
        if self.tree is not None:
            assert request.binding is not None
            self.tree.forget_unencoded(request.segment)
            whole = self.text[: request.binding.position] + tuple(request.tokens)
            encoded = whole[: request.binding.position + request.encoded]
            self.tree.insert(encoded, request.segment, self.tenant)
        self.pool.unpin(request.segment)
        return None


def arrivals_of(encoding: Encoding) -> Arrivals | None:
    """Through what a request's view grows while it runs; None: it cannot."""
    return encoding.arrivals if isinstance(encoding, FromCache) else None


def grown(job: Job, encoding: Encoding) -> Job:
    """A finished job with all that came into its view while it ran."""
    arrivals = arrivals_of(encoding)
    for arrival in () if arrivals is None else arrivals.joined:
        placement = job.placement.grown(arrival.offset, arrival.since)
        job = replace(job, parents=(*job.parents, arrival.parent), placement=placement)
    return job


def make_method(name: MethodName, restorer: Restorer) -> Method:
    """The method of that name."""
    if name == "choreo":
        return ChoreoMethod(restorer)
    return TextMethod(restorer.memory.pool, prefix_cache=name == "baseline")
