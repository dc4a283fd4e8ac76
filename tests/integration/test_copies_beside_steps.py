"""Messages come back from the host while the step that reads them computes, and the logits are the same bits."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import MakeEngine
from torch import Tensor

from choreo_agents import Engine, MessageHandle, Sampling
from choreo_agents.attention.step import StepAttention
from choreo_agents.engine import Prefill
from choreo_agents.errors import EngineFailedError
from choreo_agents.kv import copying
from choreo_agents.kv.copying import Copies

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
    engine.decode([7, 8], seen, VIEW, 400, sampling=Sampling(forced=(5, 6, 9, 4), seed=seed))


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies of later layers wait until a step has attended in its first; the layers in the order of copies."""
    attended, copied = threading.Event(), list[int]()
    move, attend = Copies._move, StepAttention.attend

    def waiting_move(copies: Copies, copy: copying._Copy, layer: int) -> None:
        assert layer == 0 or attended.wait(SOON_S), "the step waited for all layers"
        move(copies, copy, layer)
        copied.append(layer)

    def telling_attend(
        step: StepAttention,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = attend(step, layer, query, key, value, scale, sinks)
        attended.set()
        return out

    monkeypatch.setattr(Copies, "_move", waiting_move)
    monkeypatch.setattr(StepAttention, "attend", telling_attend)
    return copied


def require_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) == 4
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_step_begins_before_its_last_layer_is_there(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    engine.park()
    assert set(engine.tiers(seen)) == {"host"}
    copied = slow_copies(monkeypatch)
    answer(engine, seen, 2)
    assert copied == sorted(copied) and len(copied) == LAYERS * len(seen)
    require_same_bits(logits_by_seed[1], logits_by_seed[2])


def test_adopted_messages_arrive_beside_steps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    first, second = make_engine(), make_engine()
    seen = messages(first)
    answer(first, seen, 1)
    copied = slow_copies(monkeypatch)
    calls = [Prefill(list(first.tokens(handle))) for handle in seen]
    adopted = [second.adopt(call, first.read_kv(handle)) for call, handle in zip(calls, seen, strict=True)]
    answer(second, adopted, 2)
    assert sorted(copied) == sorted(list(range(LAYERS)) * len(seen))
    assert second.stats().adopted == len(seen)
    require_same_bits(logits_by_seed[1], logits_by_seed[2])


def test_what_leaves_again_while_it_arrives_is_whole(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    for _ in range(20):
        engine.park()
        for handle in seen:
            assert engine.read_kv(handle).keys.shape[2] == handle.length
    engine.park()
    answer(engine, seen, 2)
    require_same_bits(logits_by_seed[1], logits_by_seed[2])


def test_restored_messages_are_there_when_restore_returns(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    engine.park()
    copied, move = list[int](), Copies._move

    def telling_move(copies: Copies, copy: copying._Copy, layer: int) -> None:
        move(copies, copy, layer)
        copied.append(layer)

    monkeypatch.setattr(Copies, "_move", telling_move)
    engine.restore(seen)
    assert len(copied) == LAYERS * len(seen)


def test_a_copy_that_fails_fails_the_step_and_the_engine_starts_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    engine = make_engine(host_bytes=1 << 30)
    seen = messages(engine)
    answer(engine, seen, 1)
    engine.park()
    with monkeypatch.context() as patch:

        def broken(copies: Copies, copy: copying._Copy, layer: int) -> None:
            raise MemoryError("no such memory")

        patch.setattr(Copies, "_move", broken)
        with pytest.raises(EngineFailedError, match="could not be copied"):
            answer(engine, seen, 2)
    engine.restart()
    answer(engine, seen, 3)
    require_same_bits(logits_by_seed[1], logits_by_seed[3])
