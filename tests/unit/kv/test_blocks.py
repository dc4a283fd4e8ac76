"""Where the block allocator puts things, by example."""

import pytest

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.blocks import BlockAllocator, Run


def fragmented() -> BlockAllocator:
    """Free: (2, 2), (5, 3), (9, 1), as drawn in the class."""
    allocator = BlockAllocator(10)
    allocator.allocate(10)
    for run in (Run(5, 3), Run(9, 1), Run(2, 2)):
        allocator.free(run)
    return allocator


def test_the_tightest_free_run_is_taken() -> None:
    assert fragmented().allocate(1) == (Run(9, 1),)
    assert fragmented().allocate(2) == (Run(2, 2),)


def test_the_longest_runs_are_joined_when_none_is_long_enough() -> None:
    allocator = fragmented()
    assert allocator.allocate(4) == (Run(5, 3), Run(2, 1))
    assert allocator.free_runs() == (Run(3, 1), Run(9, 1))


def test_nothing_is_taken_when_too_little_is_free() -> None:
    allocator = fragmented()
    assert allocator.allocate(7) is None
    assert allocator.free_blocks == 6


def test_a_freed_run_is_joined_with_both_neighbours() -> None:
    allocator = fragmented()
    allocator.free(Run(4, 1))
    assert allocator.free_runs() == (Run(2, 6), Run(9, 1))


@pytest.mark.parametrize("run", [Run(2, 1), Run(3, 1), Run(1, 2), Run(7, 2), Run(4, 2), Run(0, 10)])
def test_freeing_what_is_partly_free_is_caught(run: Run) -> None:
    with pytest.raises(KVMemoryError, match="freed twice"):
        fragmented().free(run)


def test_check_catches_a_run_outside_the_pool() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    allocator.free(Run(2, 4))
    with pytest.raises(AssertionError, match="outside"):
        allocator.check()


def test_no_blocks_at_all_are_never_handed_out() -> None:
    assert BlockAllocator(0).allocate(1) is None
    with pytest.raises(KVMemoryError):
        BlockAllocator(4).allocate(0)
