"""The prefix tree by example: splits, prompts under way, and what is evicted first."""

import pytest
import torch

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.prefix_tree import PrefixTree
from choreo_agents.kv.segment import Segment

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)


@pytest.fixture
def pool() -> KVPool:
    return KVPool(GEOMETRY, 32 * GEOMETRY.bytes_per_token, torch.device("cpu"), 1)


@pytest.fixture
def tree(pool: KVPool) -> PrefixTree:
    return PrefixTree(pool)


def add(tree: PrefixTree, pool: KVPool, text: str, *, first: int = 0, encoded: int | None = None) -> Segment:
    """Insert `text` whose characters from `first` on are in a new segment; its maker keeps its pin while it encodes."""
    segment = pool.allocate(len(text) - first, first)
    segment.encoded = len(text) - first if encoded is None else encoded
    tree.insert(tokens(text), segment)
    if encoded is None:
        pool.unpin(segment)
    tree.check()
    pool.check()
    return segment


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def found(tree: PrefixTree, text: str, longest: int | None = None) -> tuple[list[tuple[Segment, int, int]], int, int]:
    match = tree.match(tokens(text), len(text) if longest is None else longest)
    return [(piece.segment, piece.first, piece.count) for piece in match.pieces], match.encoded, match.promised


def test_an_empty_tree_matches_nothing(tree: PrefixTree) -> None:
    assert found(tree, "abc") == ([], 0, 0)


def test_a_split_edge_is_found_from_both_ends(tree: PrefixTree, pool: KVPool) -> None:
    one = add(tree, pool, "abcd")
    two = add(tree, pool, "abxyz", first=2)
    assert found(tree, "abcd") == ([(one, 0, 2), (one, 2, 2)], 4, 4)
    assert found(tree, "abxyz") == ([(one, 0, 2), (two, 0, 3)], 5, 5)
    assert found(tree, "abxq") == ([(one, 0, 2), (two, 0, 1)], 3, 3)
    assert (one.pins, two.pins) == (2, 1)


def test_a_sequence_already_there_pins_nothing(tree: PrefixTree, pool: KVPool) -> None:
    add(tree, pool, "abcd")
    assert add(tree, pool, "abc").pins == 0
    assert pool.live_segments() == 1


def test_a_match_is_no_longer_than_asked(tree: PrefixTree, pool: KVPool) -> None:
    segment = add(tree, pool, "abcd")
    assert found(tree, "abcd", 3) == ([(segment, 0, 3)], 3, 3)
    assert found(tree, "abcd", 0) == ([], 0, 0)


def test_what_is_on_its_way_is_promised_but_not_shown(tree: PrefixTree, pool: KVPool) -> None:
    segment = add(tree, pool, "abcd", encoded=0)
    assert found(tree, "abcx") == ([], 0, 3)
    segment.encoded = 2
    assert found(tree, "abcx") == ([(segment, 0, 2)], 2, 3)


def test_nothing_behind_a_token_on_its_way_is_shown(tree: PrefixTree, pool: KVPool) -> None:
    add(tree, pool, "abcd", encoded=3)
    add(tree, pool, "abcdef", first=4)
    assert found(tree, "abcdef")[1:] == (3, 6)


def test_what_an_ended_request_never_encoded_is_forgotten_with_all_below(tree: PrefixTree, pool: KVPool) -> None:
    segment = add(tree, pool, "abcd", encoded=2)
    add(tree, pool, "abcdef", first=4)
    tree.forget_unencoded(segment)
    tree.check()
    assert found(tree, "abcdef") == ([(segment, 0, 2)], 2, 2)
    assert pool.live_segments() == 1


def test_a_request_that_encoded_nothing_leaves_no_trace(tree: PrefixTree, pool: KVPool) -> None:
    add(tree, pool, "abq")
    segment = add(tree, pool, "abcd", first=2, encoded=0)
    tree.forget_unencoded(segment)
    pool.unpin(segment)
    assert found(tree, "abcd")[1:] == (2, 2)
    assert pool.live_segments() == 1


def test_the_least_recently_matched_leaf_is_evicted_first(tree: PrefixTree, pool: KVPool) -> None:
    for text in ("aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"):
        add(tree, pool, text)
    found(tree, "a")
    found(tree, "c")
    assert pool.free_tokens == 2
    tree.evict(12)
    assert [found(tree, letter)[1] for letter in "abc"] == [1, 0, 1]
    tree.evict(22)
    assert [found(tree, letter)[1] for letter in "abc"] == [0, 0, 1]


def test_a_leaf_goes_before_the_prefix_it_hangs_on(tree: PrefixTree, pool: KVPool) -> None:
    add(tree, pool, "aaaa")
    add(tree, pool, "aaaabbbb", first=4)
    tree.evict(pool.free_tokens + 1)
    assert found(tree, "aaaabbbb")[1] == 4


def test_nothing_is_evicted_when_there_is_room(tree: PrefixTree, pool: KVPool) -> None:
    add(tree, pool, "aaaa")
    tree.evict(pool.free_tokens)
    assert found(tree, "aaaa")[1] == 4


def test_what_a_request_reads_is_not_evicted(tree: PrefixTree, pool: KVPool) -> None:
    read = add(tree, pool, "aaaa")
    add(tree, pool, "bbbb")
    pool.pin(read)
    assert tree.evictable_tokens() == 4
    tree.evict(pool.total_tokens + 1)
    assert (found(tree, "aaaa")[1], found(tree, "bbbb")[1]) == (4, 0)
    pool.unpin(read)
    assert tree.evictable_tokens() == 4


def test_evicting_more_than_the_pool_has_frees_everything_that_nobody_reads(tree: PrefixTree, pool: KVPool) -> None:
    for text in ("abcd", "abxy", "q"):
        add(tree, pool, text)
    tree.evict(pool.total_tokens + 1)
    assert pool.used_bytes == 0
    assert found(tree, "abcd") == ([], 0, 0)


def test_a_gap_between_prefix_and_segment_is_caught(tree: PrefixTree, pool: KVPool) -> None:
    segment = pool.allocate(1, 3)
    with pytest.raises(AssertionError, match="gap"):
        tree.insert(tokens("abcd"), segment)
