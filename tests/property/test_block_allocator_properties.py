"""Random histories of the block allocator against a plain account of who owns which block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.blocks import BlockAllocator, Run

BLOCKS = 24


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.held: list[Run] = []

    @rule(count=st.integers(1, 12))
    def allocate(self, count: int) -> None:
        lengths = sorted(run.length for run in self.allocator.free_runs())
        runs = self.allocator.allocate(count)
        if runs is None:
            assert sum(lengths) < count
            return
        assert sum(run.length for run in runs) == count
        fitting = [length for length in lengths if length >= count]
        if fitting:
            assert len(runs) == 1, "a run long enough was free"
            lengths.remove(fitting[0])
            lengths += [fitting[0] - count] * (fitting[0] > count)
            assert sorted(run.length for run in self.allocator.free_runs()) == sorted(lengths), "not the tightest"
        else:
            most = next(n for n in range(1, len(lengths) + 1) if sum(lengths[-n:]) >= count)
            assert len(runs) == most, "fewer, longer runs would have done"
        self.held.extend(runs)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Give back a held run, or only its end."""
        run = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        keep = data.draw(st.integers(0, run.length - 1))
        if keep:
            self.held.append(Run(run.start, keep))
        self.allocator.free(Run(run.start + keep, run.length - keep))

    @precondition(lambda self: self.allocator.free_runs())
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        free = data.draw(st.sampled_from(self.allocator.free_runs()))
        first = data.draw(st.integers(free.start, free.end - 1))
        with pytest.raises(KVMemoryError, match="freed twice"):
            self.allocator.free(Run(first, data.draw(st.integers(1, free.end - first))))

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.allocator.check()
        free = self.allocator.free_runs()
        blocks = [block for run in (*self.held, *free) for block in range(run.start, run.end)]
        assert sorted(blocks) == list(range(BLOCKS))
        assert self.allocator.free_blocks == sum(run.length for run in free)


TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.lists(st.integers(1, 6), min_size=1), st.randoms(use_true_random=False))
def test_freeing_everything_in_any_order_leaves_one_run(counts: list[int], random) -> None:
    allocator = BlockAllocator(sum(counts))
    held = [run for count in counts for run in allocator.allocate(count)]
    random.shuffle(held)
    for run in held:
        allocator.free(run)
    assert allocator.free_runs() == (Run(0, sum(counts)),)
