"""Messages come back from the host while the step that reads them computes, and the logits are the same bits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import MakeEngine
from torch import Tensor

from choreo_agents import Engine, MessageHandle, Sampling
from choreo_agents.engine.adapters import Loaded
from choreo_agents.errors import CapacityError, ChoreoError, EngineFailedError
from choreo_agents.kv import copying
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV
from choreo_agents.synthesis.mapper import CacheMapper

SOON_S = 20.0
LAYERS = 3
VIEW = [200, 0, 90]
Logits = dict[int, list[Tensor]]


@pytest.fixture(autouse=True)
def everything_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small for a thread."""
    monkeypatch.setattr(copying, "BESIDE_BYTES", 0)


def messages(engine: Engine) -> list[MessageHandle]:
    return [engine.prefill(list(range(3 + number, 60 + 5 * number))) for number in range(3)]


def answer(engine: Engine, seen: list[MessageHandle], seed: int) -> None:
    engine.decode([7, 8], seen, VIEW, 400, sampling=Sampling(forced_token_ids=(5, 6, 9, 4), seed=seed))


def leave(engine: Engine) -> None:
    """Park everything, and wipe what it leaves behind: it may come back to the same slots."""
    engine.kv.offload()
    pool = engine._core.pool
    assert not pool.used_bytes
    for side in (*pool.keys, *pool.values):
        side.fill_(9.0)


class Watch:
    """Copies of later layers wait until a step has attended in its first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attended, self.copied = threading.Event(), list[int]()
        self.begun = threading.Event()
        fill, wait = KVPool.fill, copying.LayeredCopy.wait

        def waiting_fill(pool: KVPool, segment: Segment, host_kv: HostKV, layer: int) -> None:
            self.begun.set()
            assert layer == 0 or self.attended.wait(SOON_S), "the step waited for all layers"
            time.sleep(0.02)
            fill(pool, segment, host_kv, layer)
            self.copied.append(layer)

        def telling_wait(copy: copying.LayeredCopy, layer: int) -> None:
            if layer:  # it has attended in those before
                self.attended.set()
            wait(copy, layer)

        monkeypatch.setattr(KVPool, "fill", waiting_fill)
        monkeypatch.setattr(copying.LayeredCopy, "wait", telling_wait)


def require_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) == 4
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_step_begins_before_its_last_layer_is_there(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    leave(engine)
    assert set(engine.kv.tiers(seen)) == {"host"}
    watch = Watch(monkeypatch)
    answer(engine, seen, 2)
    assert watch.copied == [layer for layer in range(LAYERS) for _ in seen]
    require_same_bits(logits_by_seed[1], logits_by_seed[2])
    assert engine.stats().restored_from_host == len(seen)


def test_who_reads_meanwhile_waits_until_all_is_there(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    wanted = engine.kv.read(seen[0])
    leave(engine)
    watch = Watch(monkeypatch)
    # The step attends in its first layer only when somebody asks for what is on its way.
    settle = copying.LayeredCopy.wait
    asked, found = threading.Event(), list[HostKV]()

    def late_wait(copy: copying.LayeredCopy, layer: int) -> None:
        assert asked.wait(SOON_S)
        settle(copy, layer)

    monkeypatch.setattr(copying.LayeredCopy, "wait", late_wait)
    reader = threading.Thread(target=lambda: (asked.set(), found.append(engine.kv.read(seen[0]))))
    speaker = threading.Thread(target=lambda: answer(engine, seen, 1))
    speaker.start()
    assert watch.begun.wait(SOON_S)
    reader.start()
    for thread in (speaker, reader):
        thread.join(SOON_S)
    assert torch.equal(found[0].keys, wanted.keys) and torch.equal(found[0].values, wanted.values)


def test_mapped_copies_wait_for_what_they_are_made_of(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    """A mapper runs before the pass, in the step that brings its source back."""
    engine = make_engine(host_bytes=1 << 30)
    adapter = engine.model.adapter
    mapper = CacheMapper(adapter.geometry, adapter.kinds)
    engine._core.adapters.add_default(Loaded(Path("zero"), None, mapper, mapper.fingerprint))
    [one, *_] = messages(engine)
    wanted = engine.kv.read(one)
    leave(engine)
    fill = KVPool.fill

    def slow_fill(pool: KVPool, segment: Segment, host_kv: HostKV, layer: int) -> None:
        time.sleep(0.05)
        fill(pool, segment, host_kv, layer)

    monkeypatch.setattr(KVPool, "fill", slow_fill)
    [copy] = engine.branches.map([one])
    assert torch.equal(engine.kv.read(copy).keys, wanted.keys)


def test_what_leaves_again_while_it_arrives_is_whole(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    for _ in range(20):
        engine.kv.offload()
        for handle in seen:
            assert engine.kv.read(handle).keys.shape[2] == handle.length
    engine.kv.offload()
    answer(engine, seen, 2)
    require_same_bits(logits_by_seed[1], logits_by_seed[2])


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("failure", "told"), [(OSError("no such bus"), EngineFailedError), (MemoryError("no such memory"), CapacityError)]
)
def test_a_copy_that_fails_fails_its_step_and_nothing_is_lost(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    logits_by_seed: Logits,
    failure: Exception,
    told: type[ChoreoError],
    beside: bool,
) -> None:
    monkeypatch.setattr(copying, "BESIDE_BYTES", 0 if beside else 1 << 30)
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    engine.kv.offload()
    held = engine.stats().host_bytes
    with monkeypatch.context() as patch:

        def broken(pool: KVPool, segment: Segment, host_kv: HostKV, layer: int) -> None:
            raise failure

        patch.setattr(KVPool, "fill", broken)
        with pytest.raises(told, match="could not be copied"):
            answer(engine, seen, 2)
    assert set(engine.kv.tiers(seen)) == {"host"} and engine.stats().host_bytes == held
    assert engine.stats().restored_from_host == 0
    answer(engine, seen, 3)
    assert engine.stats().recomputed == 0
    require_same_bits(logits_by_seed[1], logits_by_seed[3])
