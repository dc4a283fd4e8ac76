"""Radix tree over all encoded tokens, which finds the longest cached prefix of a prompt."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Piece, Segment


@dataclass(eq=False)
class _Node:
    """An edge of the tree, with the tokens of a segment from index `first` on."""

    tokens: tuple[int, ...]
    segment: Segment
    """Segment of its tokens; an empty one for a root."""
    first: int
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    """Breaks ties between leaves that were last used together, reproducibly."""

    def encoded(self) -> int:
        """Return the number of its tokens that are encoded; running requests encode the rest."""
        return max(0, min(len(self.tokens), self.segment.encoded - self.first))


@dataclass(frozen=True)
class PrefixMatch:
    """The part of a prompt that the tree has."""

    pieces: tuple[Piece, ...]
    """The encoded part, at the positions where it was encoded."""
    encoded: int
    """Tokens in these pieces."""
    promised: int
    """Tokens of the prefix once the running requests have encoded their prompts."""


class PrefixTree:
    """Radix tree of prompts and the answers to them. Each node pins its segment.

    Every tenant has a root of its own, and never finds KV of another. Not thread-safe.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._roots: dict[str, _Node] = {}
        self._clock = 0

    def match(self, prompt: Sequence[int], longest: int, tenant: str = "") -> PrefixMatch:
        """Find the longest prefix of a tenant's prompt, at most `longest` tokens, that is or will be encoded."""
        pieces: list[Piece] = []
        encoded, promised, broken = 0, 0, False
        self._clock += 1
        node = self._root(tenant)
        while promised < longest and (child := node.children.get(prompt[promised])) is not None:
            common = min(_count_common(child.tokens, prompt, promised), longest - promised)
            encoded_here = min(common, child.encoded())
            child.used = self._clock
            if encoded_here and not broken:
                pieces.append(Piece(child.segment, child.first, encoded_here, child.segment.native_offset))
                encoded += encoded_here
            broken = broken or encoded_here < common
            promised += common
            if common < len(child.tokens):
                break
            node = child
        return PrefixMatch(tuple(pieces), encoded, promised)

    def insert(self, tokens: Sequence[int], segment: Segment, tenant: str = "") -> None:
        """Add a tenant's sequence whose tokens from `segment.native_offset` on are, or will be, in `segment`."""
        node, at = self._root(tenant), 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            common = _count_common(child.tokens, tokens, at)
            at += common
            if common < len(child.tokens):
                if at == len(tokens):
                    return
                node = self._split(child, common)
                break
            node = child
        if at < len(tokens):
            self._pool.pin(segment)
            first = at - segment.native_offset
            assert first >= 0, "a gap between a sequence's prefix in the tree and its segment"
            node.children[tokens[at]] = _Node(tuple(tokens[at:]), segment, first, node, used=self._clock)

    def forget_unencoded(self, segment: Segment) -> None:
        """Remove tokens that a segment will never hold because its request ended early, and the nodes below."""
        own = [node for node in self._nodes() if node.segment is segment and node.encoded() < len(node.tokens)]
        for node in reversed(own):  # the nodes below come first
            for child in list(node.children.values()):
                self._remove(child)
            if node.encoded():
                node.tokens = node.tokens[: node.encoded()]
            else:
                self._remove(node)

    def evictable_tokens(self) -> int:
        """Return the tokens that `evict` can free: segments that only the tree pins, with no pinned node below."""
        pins, pinned = self._pins(), set[Segment]()
        for node in self._nodes():
            above: _Node | None = node if node.segment.pins != pins[node.segment] else None
            while above is not None:
                pinned.add(above.segment)
                above = above.parent
        return sum(segment.capacity for segment in pins if segment not in pinned)

    def evict(self, tokens: int) -> None:
        """Drop least recently used leaves until `tokens` are free in the pool, or nothing more can be dropped."""
        if self._pool.free_tokens >= tokens:
            return
        pins = self._pins()

        def droppable(node: _Node) -> bool:
            return not node.children and node.parent is not None and node.segment.pins == pins[node.segment]

        leaves = [(node.used, node.number, node) for node in self._nodes() if droppable(node)]
        heapify(leaves)
        while leaves and self._pool.free_tokens < tokens:
            _, _, node = heappop(leaves)
            assert node.parent is not None
            pins[node.segment] -= 1
            self._remove(node)
            if droppable(node.parent):
                heappush(leaves, (node.parent.used, node.parent.number, node.parent))

    def drop(self, matches: Callable[[str], bool]) -> None:
        """Drop the trees of all tenants for which `matches` is true."""
        for tenant in [tenant for tenant in self._roots if matches(tenant)]:
            for child in list(self._roots.pop(tenant).children.values()):
                self._remove(child)

    def check(self) -> None:
        """Assert that edges start with distinct tokens, are not empty, and lie inside their segments."""
        for node in self._nodes():
            assert node.tokens and node.parent is not None
            assert node.parent.children[node.tokens[0]] is node
            assert node.first >= 0 and node.first + node.encoded() <= node.segment.capacity

    def _root(self, tenant: str) -> _Node:
        if tenant not in self._roots:
            self._roots[tenant] = _Node((), Segment((), 0), 0, None)
        return self._roots[tenant]

    def _nodes(self) -> Iterator[_Node]:
        """Yield all nodes but the roots, each before those below it."""
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _pins(self) -> Counter[Segment]:
        return Counter(node.segment for node in self._nodes())

    def _split(self, node: _Node, at: int) -> _Node:
        """Split an edge in two; return the upper one."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], node.segment, node.first, node.parent, used=node.used)
        self._pool.pin(node.segment)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.first, node.parent = node.tokens[at:], node.first + at, upper
        upper.children[node.tokens[0]] = node
        return upper

    def _remove(self, node: _Node) -> None:
        for child in list(node.children.values()):
            self._remove(child)
        assert node.parent is not None
        del node.parent.children[node.tokens[0]]
        self._pool.unpin(node.segment)


def _count_common(edge: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Count the leading tokens of `edge` that agree with `tokens` from `at` on."""
    return sum(itertools.takewhile(bool, map(operator.eq, edge, tokens[at : at + len(edge)])))
