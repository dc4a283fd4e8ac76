"""Methods "baseline" and "naive": calls encode their parents' text again, with or without a prefix cache (section
3.1)."""

from __future__ import annotations

from choreo_agents.engine.messages.message import Lineage
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.prefix_tree import PrefixMatch, PrefixTree
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.request import Binding, Encoding, Request


class TextMethod:
    """Method whose calls encode their parents' text again.

    Args:
        pool: Pool that holds KV while it is needed, or cached.
        prefix_cache: Whether to keep all encoded text, and reuse the longest prefix a prompt shares with it.
    """

    keeps_kv = False

    def __init__(self, pool: KVPool, *, prefix_cache: bool) -> None:
        self._pool, self._tree, self._caches = pool, PrefixTree(pool), prefix_cache

    def encoding(self, lineage: Lineage) -> FromText:
        found_as = f"{lineage.tenant} {lineage.adapter}"  # KV of one adapter is no prefix for another
        return FromText(lineage.text(), self._pool, self._tree, found_as, caches=self._caches)

    def reach(self, lineage: Lineage, added: int) -> int:
        return len(lineage.text()) + added

    def room(self, lineage: Lineage, added: int) -> int:
        return self._pool.rounded(len(lineage.text()) + added)

    def evictable_tokens(self) -> int:
        return self._tree.evictable_tokens()

    def evict(self, tokens: int) -> None:
        self._tree.evict(tokens)

    def pinned(self, tenant: str) -> str:
        return ""

    def drop_tenant(self, tenant: str) -> None:
        self._tree.drop(lambda owner: owner.partition(" ")[0] == tenant)

    def check(self) -> None:
        self._tree.check()


class FromText(Encoding):
    """Encoding of a request over its parents' text, less the longest prefix that is cached.

    Args:
        text: Tokens of the prompt.
        pool: Pool that holds what it reads.
        tree: Tree of encoded prefixes; empty if nothing is cached.
        tenant: Name under which the tree keeps them.
        caches: Whether to add its own tokens to the tree.
    """

    def __init__(self, text: tuple[int, ...], pool: KVPool, tree: PrefixTree, tenant: str, *, caches: bool) -> None:
        self.text, self.tenant, self.pool, self.tree, self.caches = text, tenant, pool, tree, caches
        # The last token is always encoded: its logits give the first sample.
        self.longest = len(text) - 1
        self.match = PrefixMatch((), 0, 0)

    def ready(self) -> bool:
        match = self.tree.match(self.text, self.longest, self.tenant)
        return match.promised == match.encoded

    def prompt_tokens(self) -> int:
        return len(self.text) - self.tree.match(self.text, self.longest, self.tenant).encoded

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        self.match = self.tree.match(self.text, self.longest if reuse else 0, self.tenant)
        for piece in self.match.pieces:
            self.pool.pin(piece.segment)
        return 0, len(self.text) - self.match.encoded

    def pinned_tokens(self) -> int:
        return sum(segment.capacity for segment in {piece.segment for piece in self.match.pieces})

    def bind(self) -> Binding:
        return Binding(self.match.pieces, self.text[self.match.encoded :], self.match.encoded)

    def bound(self, segment: Segment) -> None:
        if self.caches:
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
            if self.caches and request.binding is not None:
                self.tree.forget_unencoded(segment)
                whole = self.text[: request.binding.position] + tuple(request.tokens)
                encoded = whole[: request.binding.position + request.encoded]
                self.tree.insert(encoded, segment, self.tenant)
        finally:
            self.pool.unpin(segment)
