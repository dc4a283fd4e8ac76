"""Calls that encode their parents' text again, with or without a prefix cache: the twins of the paper's section 3.1."""

from __future__ import annotations

from choreo_agents.engine.messages.message import Lineage
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.prefix_tree import PrefixMatch, PrefixTree
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.request import Encoding, Request
from choreo_agents.runtime.step import Binding


class TextMethod:
    """Calls re-encode their parents' text.

    Args:
        pool: Where encodings live while they are needed, or cached.
        prefix_cache: Keep everything that was encoded, and reuse the longest prefix a prompt shares with it.
    """

    keeps_kv = False

    def __init__(self, pool: KVPool, *, prefix_cache: bool) -> None:
        self._pool = pool
        self._tree = PrefixTree(pool) if prefix_cache else None

    def encoding(self, lineage: Lineage) -> FromText:
        # What one adapter has encoded is no prefix for another.
        return FromText(lineage.text(), self._pool, self._tree, f"{lineage.tenant} {lineage.adapter}")

    def reach(self, lineage: Lineage, added: int) -> int:
        return len(lineage.text()) + added

    def room(self, lineage: Lineage, added: int) -> int:
        return self._pool.rounded(len(lineage.text()) + added)

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


class FromText(Encoding):
    """A request over the words of its parents, encoded again as far as no earlier call has encoded the same."""

    def __init__(self, text: tuple[int, ...], pool: KVPool, tree: PrefixTree | None, tenant: str) -> None:
        self.text = text
        self.tenant = tenant
        self.pool = pool
        self.tree = tree
        # The last token is always encoded: its logits give the first sample.
        self.longest = len(text) - 1
        self.match = PrefixMatch((), 0, 0)

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

    def pinned_tokens(self) -> int:
        return sum(segment.capacity for segment in {piece.segment for piece in self.match.pieces})

    def bind(self) -> Binding:
        return Binding(self.match.pieces, self.text[self.match.encoded :], self.match.encoded)

    def bound(self, segment: Segment) -> None:
        if self.tree is not None:
            self.tree.insert(self.text, segment, self.tenant)

    def unpin(self) -> None:
        pieces, self.match = self.match.pieces, PrefixMatch((), 0, 0)
        for piece in pieces:
            self.pool.unpin(piece.segment)

    def close(self, request: Request) -> None:
        segment = request.hand_over()
        if segment is None:
            return
        try:
            if self.tree is not None and request.binding is not None:
                self.tree.forget_unencoded(segment)
                whole = self.text[: request.binding.position] + tuple(request.tokens)
                encoded = whole[: request.binding.position + request.encoded]
                self.tree.insert(encoded, segment, self.tenant)
        finally:
            self.pool.unpin(segment)
