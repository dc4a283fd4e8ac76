"""Random lives of segments in a small pool, and the slots of segments in several runs."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from choreo_agents.kv.blocks import Run
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
BLOCK, BLOCKS = 4, 12


def flat(runs: list[Run] | tuple[Run, ...]) -> list[int]:
    return [slot for run in runs for slot in range(run.start, run.end)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(GEOMETRY, BLOCK * BLOCKS * GEOMETRY.bytes_per_token, torch.device("cpu"), BLOCK)
        self.pins: dict[Segment, int] = {}
        self.asked: dict[Segment, int] = {}

    def some(self, data: st.DataObject) -> Segment:
        return data.draw(st.sampled_from(list(self.pins)))

    @rule(tokens=st.integers(1, 30), native_offset=st.integers(0, 99))
    def allocate(self, tokens: int, native_offset: int) -> None:
        free = self.pool.free_tokens
        segment = self.pool.allocate(tokens, native_offset)
        if segment is None:
            assert self.pool.rounded(tokens) > free
            return
        assert (segment.capacity, segment.pins, segment.encoded) == (self.pool.rounded(tokens), 1, 0)
        assert segment.native_offset == native_offset
        self.pins[segment], self.asked[segment] = 1, tokens

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def encode(self, data: st.DataObject) -> None:
        segment = self.some(data)
        segment.encoded = data.draw(st.integers(segment.encoded, min(self.asked[segment], segment.capacity)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        segment = self.some(data)
        before = flat(segment.runs)
        self.pool.complete(segment)
        assert segment.capacity == self.pool.rounded(max(1, segment.encoded))
        assert flat(segment.runs) == before[: segment.capacity], "encoded tokens were moved"

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        segment = self.some(data)
        self.pool.pin(segment)
        self.pins[segment] += 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        segment = self.some(data)
        self.pool.unpin(segment)
        self.pins[segment] -= 1
        if not self.pins[segment]:
            del self.pins[segment]

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check()
        held = sum(segment.capacity for segment in self.pins)
        assert self.pool.live_segments() == len(self.pins)
        assert self.pool.used_bytes == held * GEOMETRY.bytes_per_token
        assert self.pool.free_tokens == self.pool.total_tokens - held
        assert all(segment.pins == pins for segment, pins in self.pins.items())
        slots = [slot for segment in self.pins for slot in flat(segment.runs)]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(BLOCK * BLOCKS))


TestPoolMachine = PoolMachine.TestCase


@given(st.data())
def test_slots_are_those_of_the_tokens_asked_for(data: st.DataObject) -> None:
    blocks = data.draw(st.permutations(range(6)))
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    segment = Segment(tuple(Run(5 * block, length) for block, length in zip(blocks, lengths, strict=False)), 0)
    first = data.draw(st.integers(0, segment.capacity))
    count = data.draw(st.integers(0, segment.capacity - first))
    found = segment.slots(first, count)
    assert flat(found) == flat(segment.runs)[first : first + count]
    assert all(run.length > 0 for run in found) and len(found) <= len(segment.runs)
