"""Keys and values arrive in the pool in the order of layers, wherever their slots are, and readers wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.kv import copying
from choreo_agents.kv.copying import Copies
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import Parcel

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
SOON_S = 20.0


@pytest.fixture(autouse=True)
def everything_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small for a thread."""
    monkeypatch.setattr(copying, "BESIDE_BYTES", 0)


def pool_of(blocks: int = 16) -> KVPool:
    return KVPool(GEOMETRY, blocks * 4 * GEOMETRY.bytes_per_token, torch.device("cpu"), 4)


def parcel(tokens: int, seed: int) -> Parcel:
    shape = (GEOMETRY.layers, GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim)
    rng = torch.Generator().manual_seed(seed)
    return Parcel(torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))


def allocated(pool: KVPool, tokens: int) -> Segment:
    segment = pool.allocate(tokens, 0)
    assert segment is not None
    return segment


class Gate:
    """Copies wait at a layer until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, closed_from: int = 1) -> None:
        self.closed_from = closed_from
        self.opened = threading.Event()
        self.order: list[tuple[int, Segment]] = []
        move = Copies._move

        def gated(copies: Copies, copy: copying._Copy, layer: int) -> None:
            if layer >= self.closed_from:
                assert self.opened.wait(SOON_S)
            move(copies, copy, layer)
            self.order.append((layer, copy.segment))

        monkeypatch.setattr(Copies, "_move", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def later(work: threading.Event, call: object) -> threading.Thread:
    """A thread that calls, and then says so."""

    def run() -> None:
        assert callable(call)
        call()
        work.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6), gone=st.sets(st.integers(0, 5)), beside=st.booleans())
def test_what_is_written_is_read_wherever_its_slots_are(sizes: list[int], gone: set[int], beside: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BESIDE_BYTES", 0 if beside else 1 << 30)
        pool = pool_of()
        first = [allocated(pool, size) for size in sizes]
        for number in gone & set(range(len(first))):
            pool.unpin(first[number])  # leaves gaps: later segments are of several runs
        kept = [segment for number, segment in enumerate(first) if number not in gone]
        free = pool.free_tokens
        kept += [allocated(pool, free)] if free else []
        parcels = [parcel(segment.capacity, seed) for seed, segment in enumerate(kept)]
        for segment, each in zip(kept, parcels, strict=True):
            pool.write(segment, each)
        for segment, each in zip(kept, parcels, strict=True):
            found = pool.read(segment)
            assert torch.equal(found.keys, each.keys) and torch.equal(found.values, each.values)


def test_a_layer_is_waited_for_and_later_ones_are_not(gate: Gate) -> None:
    pool = pool_of()
    segment, filled = allocated(pool, 8), parcel(8, 1)
    pool.write(segment, filled)
    pool.copies.settle(0)
    [run] = segment.runs
    assert torch.equal(pool.keys[0][:, run.start : run.end], filled.keys[0])
    done = threading.Event()
    thread = later(done, lambda: pool.copies.settle(1))
    assert not done.wait(0.05), "a layer was read before it was there"
    gate.opened.set()
    thread.join(SOON_S)
    assert done.is_set()
    assert torch.equal(pool.values[1][:, run.start : run.end], filled.values[1])


def test_first_layers_of_all_come_before_second_ones(gate: Gate) -> None:
    pool = pool_of()
    gate.closed_from = 0
    one, other = allocated(pool, 4), allocated(pool, 4)
    pool.write(one, parcel(4, 1))
    pool.write(other, parcel(4, 2))
    gate.opened.set()
    pool.copies.finish_all()
    assert gate.order == [(layer, segment) for layer in range(3) for segment in (one, other)]


def test_slots_are_given_back_when_nothing_is_copied_into_them_any_more(gate: Gate) -> None:
    pool = pool_of(2)
    segment = allocated(pool, 8)
    pool.write(segment, parcel(8, 1))
    freed = threading.Event()
    thread = later(freed, lambda: pool.unpin(segment))
    assert not freed.wait(0.05) and pool.allocate(8, 0) is None
    gate.opened.set()
    thread.join(SOON_S)
    again, filled = allocated(pool, 8), parcel(8, 2)
    pool.write(again, filled)
    assert torch.equal(pool.read(again).keys, filled.keys)


def test_what_cannot_be_copied_fails_its_readers_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(copies: Copies, copy: copying._Copy, layer: int) -> None:
        raise MemoryError("no such memory")

    monkeypatch.setattr(Copies, "_move", broken)
    pool = pool_of()
    segment = allocated(pool, 8)
    pool.write(segment, parcel(8, 1))
    for read in (lambda: pool.copies.settle(0), pool.copies.finish_all, lambda: pool.read(segment)):
        with pytest.raises(RuntimeError, match="could not be copied"):
            read()
    pool.unpin(segment)
    assert pool.live_segments() == 0


def test_no_thread_is_left_when_all_is_there() -> None:
    pool = pool_of()
    for seed in range(3):
        segment = allocated(pool, 8)
        pool.write(segment, parcel(8, seed))
        pool.copies.finish_all()
        for thread in [each for each in threading.enumerate() if each.name == "choreo-copy"]:
            thread.join(SOON_S)
            assert not thread.is_alive()
        pool.unpin(segment)
