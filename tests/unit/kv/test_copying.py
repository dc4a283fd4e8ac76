"""Keys and values arrive in the pool in the order of layers, wherever their slots are, and readers wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.kv import copying
from choreo_agents.kv.copying import Arrival, LayeredCopy
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
SOON_S = 20.0


@pytest.fixture(autouse=True)
def everything_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small for a thread."""
    monkeypatch.setattr(copying, "BESIDE_BYTES", 0)


def pool_of(blocks: int = 16) -> KVPool:
    return KVPool(GEOMETRY, blocks * 4 * GEOMETRY.bytes_per_token, torch.device("cpu"), 4)


def host_kv(tokens: int, seed: int) -> HostKV:
    shape = (GEOMETRY.layers, GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim)
    rng = torch.Generator().manual_seed(seed)
    return HostKV(torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))


def allocated(pool: KVPool, tokens: int) -> Segment:
    segment = pool.allocate(tokens, 0)
    assert segment is not None
    return segment


def arrival(pool: KVPool, each: HostKV) -> Arrival:
    segment = allocated(pool, each.keys.shape[2])
    segment.encoded = each.keys.shape[2]
    return Arrival(segment, each)


class Gate:
    """Layers from the second on are copied once it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.order: list[tuple[int, Segment]] = []
        fill = KVPool.fill

        def gated(pool: KVPool, segment: Segment, each: HostKV, layer: int) -> None:
            assert not layer or self.opened.wait(SOON_S)
            fill(pool, segment, each, layer)
            self.order.append((layer, segment))

        monkeypatch.setattr(KVPool, "fill", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5)),
    way=st.sampled_from(["write", "beside", "at once"]),
)
def test_what_is_written_is_read_wherever_its_slots_are(sizes: list[int], gone: set[int], way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BESIDE_BYTES", 0 if way == "beside" else 1 << 30)
        pool = pool_of()
        first = [allocated(pool, size) for size in sizes]
        for number in gone & set(range(len(first))):
            pool.unpin(first[number])  # leaves gaps: later segments are of several runs
        kept = [segment for number, segment in enumerate(first) if number not in gone]
        free = pool.free_tokens
        kept += [allocated(pool, free)] if free else []
        host_kvs = [host_kv(segment.capacity, seed) for seed, segment in enumerate(kept)]
        if way == "write":
            for segment, each in zip(kept, host_kvs, strict=True):
                pool.write(segment, each)
        else:
            for segment in kept:
                segment.encoded = segment.capacity
            arrivals = [Arrival(segment, each) for segment, each in zip(kept, host_kvs, strict=True)]
            with LayeredCopy(pool, arrivals):
                pass
            assert all(each.is_there and each.over.is_set() and each.kv is None for each in arrivals)
        for segment, each in zip(kept, host_kvs, strict=True):
            found = pool.read(segment)
            assert torch.equal(found.keys, each.keys) and torch.equal(found.values, each.values)


def test_a_layer_is_waited_for_and_later_ones_are_not(gate: Gate) -> None:
    pool, each = pool_of(), host_kv(8, 1)
    coming = arrival(pool, each)
    [run] = coming.segment.runs
    with LayeredCopy(pool, [coming]) as copy:
        copy.wait(0)
        assert torch.equal(pool.keys[0][:, run.start : run.end], each.keys[0])
        assert not coming.over.is_set()
        done = threading.Event()
        thread = threading.Thread(target=lambda: (copy.wait(1), done.set()))
        thread.start()
        assert not done.wait(0.05), "a layer was read before it was there"
        gate.opened.set()
        thread.join(SOON_S)
        assert done.is_set() and torch.equal(pool.values[1][:, run.start : run.end], each.values[1])
    assert coming.is_there


def test_first_layers_of_all_come_before_second_ones(gate: Gate) -> None:
    pool = pool_of()
    one, other = (arrival(pool, host_kv(4, seed)) for seed in (1, 2))
    gate.opened.set()
    with LayeredCopy(pool, [one, other]):
        pass
    assert gate.order == [(layer, each.segment) for layer in range(3) for each in (one, other)]


def test_the_block_ends_when_nothing_is_copied_any_more(gate: Gate) -> None:
    """Also if what computes fails meanwhile: slots may be given back then."""
    pool = pool_of()
    coming = arrival(pool, host_kv(4, 1))
    threading.Timer(0.05, gate.opened.set).start()
    with pytest.raises(ZeroDivisionError), LayeredCopy(pool, [coming]):
        raise ZeroDivisionError
    assert len(gate.order) == 3 and coming.is_there
    assert not any(thread.name == "choreo-copy" for thread in threading.enumerate())


@pytest.mark.parametrize("beside", [True, False])
def test_what_cannot_be_copied_fails_its_readers_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(copying, "BESIDE_BYTES", 0 if beside else 1 << 30)

    def broken(pool: KVPool, segment: Segment, each: HostKV, layer: int) -> None:
        raise MemoryError("no such memory")

    monkeypatch.setattr(KVPool, "fill", broken)
    pool = pool_of()
    coming = arrival(pool, host_kv(8, 1))
    with pytest.raises(RuntimeError, match="could not be copied"), LayeredCopy(pool, [coming]) as copy:
        copy.wait(0)
    assert not coming.over.is_set() and not coming.is_there and coming.kv is not None
    coming.end(is_there=False)
    assert coming.over.is_set() and not coming.is_there
    unread = arrival(pool, host_kv(8, 1))
    with pytest.raises(RuntimeError, match="could not be copied"), LayeredCopy(pool, [unread]):
        pass


def test_without_a_thread_it_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    pool, each = pool_of(), host_kv(8, 1)
    coming = arrival(pool, each)
    with LayeredCopy(pool, [coming]) as copy:
        assert coming.is_there
        copy.wait(2)
    assert torch.equal(pool.read(coming.segment).keys, each.keys)
