"""The pool's budget, rounding and pins, by example."""

import pytest
import torch

from choreo_agents.errors import InvalidRequestError, KVBudgetError, KVMemoryError
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.kv.tiers import HostKV

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def pool_of(blocks: int, *, spare_bytes: int = 0) -> KVPool:
    budget = blocks * 16 * GEOMETRY.bytes_per_token + spare_bytes
    return KVPool(GEOMETRY, budget, torch.device("cpu"))


def test_a_token_costs_its_keys_and_values_in_every_layer() -> None:
    assert GEOMETRY.bytes_per_token == 2 * 3 * 2 * 8 * 2


def test_the_tensors_stay_within_the_budget() -> None:
    pool = pool_of(3, spare_bytes=5)
    assert pool.total_tokens == 48
    assert [tuple(part.shape) for part in (*pool.keys, *pool.values)] == [(2, 48, 8)] * 6
    assert sum(part.nbytes for part in (*pool.keys, *pool.values)) == 48 * GEOMETRY.bytes_per_token


def test_a_budget_below_one_block_says_what_would_do() -> None:
    least = 16 * GEOMETRY.bytes_per_token
    with pytest.raises(KVBudgetError, match=f"{least - 1}.*set at least {least}") as caught:
        KVPool(GEOMETRY, least - 1, torch.device("cpu"))
    assert isinstance(caught.value, InvalidRequestError)
    assert KVPool(GEOMETRY, least, torch.device("cpu")).total_tokens == 16


@pytest.mark.parametrize(("tokens", "room"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_room_comes_in_whole_blocks(tokens: int, room: int) -> None:
    assert pool_of(1).rounded(tokens) == room


def test_used_bytes_follow_a_segment_through_its_life() -> None:
    pool = pool_of(4)
    segment = pool.allocate(40, native_offset=7)
    assert segment is not None and segment.pins == 1 and segment.native_offset == 7
    assert pool.used_bytes == 48 * GEOMETRY.bytes_per_token
    segment.encoded = 20
    pool.complete(segment)
    assert pool.used_bytes == 32 * GEOMETRY.bytes_per_token
    pool.unpin(segment)
    assert pool.used_bytes == 0 and pool.live_segments() == 0
    pool.check()


def test_a_full_pool_gives_none() -> None:
    pool = pool_of(2)
    assert pool.allocate(17, 0) is not None
    assert pool.allocate(1, 0) is None


def test_an_empty_segment_keeps_one_block_when_completed() -> None:
    pool = pool_of(4)
    segment = pool.allocate(64, 0)
    pool.complete(segment)
    assert segment.capacity == 16


def test_a_segment_in_several_runs_is_completed_from_its_end() -> None:
    pool = pool_of(4)
    first, second, third = (pool.allocate(16, 0) for _ in range(3))
    pool.unpin(first)
    pool.unpin(third)
    segment = pool.allocate(48, 0)
    assert segment.runs == (Run(32, 32), Run(0, 16))
    segment.encoded = 33
    pool.complete(segment)
    assert segment.runs == (Run(32, 32), Run(0, 16))
    segment.encoded = 16
    pool.complete(segment)
    assert segment.runs == (Run(32, 16),)
    pool.check()
    assert second.runs == (Run(16, 16),)


def test_pins_of_a_freed_segment_are_caught() -> None:
    pool = pool_of(1)
    segment = pool.allocate(1, 0)
    pool.unpin(segment)
    uses = (pool.pin, pool.unpin, pool.complete, pool.read, lambda freed: freed.slots(0, 1))
    for use in (*uses, lambda freed: pool.write(freed, HostKV(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8)))):
        with pytest.raises(KVMemoryError):
            use(segment)
    pool.check()


def test_check_catches_a_lost_block() -> None:
    pool = pool_of(2)
    segment = pool.allocate(32, 0)
    segment.runs = (Run(0, 16),)
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_slots_cross_runs() -> None:
    segment = Segment((Run(32, 4), Run(8, 4), Run(0, 2)), native_offset=0)
    assert segment.capacity == 10
    assert segment.slots(0, 10) == [Run(32, 4), Run(8, 4), Run(0, 2)]
    assert segment.slots(3, 6) == [Run(35, 1), Run(8, 4), Run(0, 1)]
    assert segment.slots(4, 2) == [Run(8, 2)]
    assert segment.slots(4, 0) == []


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (3, 2)])
def test_slots_outside_the_segment_are_caught(first: int, count: int) -> None:
    with pytest.raises(KVMemoryError):
        Segment((Run(0, 4),), 0).slots(first, count)


def test_a_piece_is_shifted_by_where_it_is_shown_less_where_it_was_encoded() -> None:
    segment = Segment((Run(0, 4),), native_offset=30)
    assert Piece(segment, 1, 2, offset=10).shift == -20
