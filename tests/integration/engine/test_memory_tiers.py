"""KV that leaves the pool comes back: from the host, from the disk, or computed again, with the same logits."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine

from choreo_agents import Decode, Engine, MessageHandle, Sampling
from choreo_agents.errors import CapacityError, EngineFailedError, InvalidRequestError, RequestTimeoutError
from choreo_agents.kv import entry_files
from choreo_agents.kv.store.spill import SpillFile

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
SMALL = 256 * TOKEN
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "lost": lambda _: {},
    "host": lambda _: {"host_bytes": 1 << 30},
    "disk": lambda folder: {"disk": folder},
    "both": lambda folder: {"host_bytes": 150 * TOKEN, "disk": folder},
    "tight": lambda folder: {"host_bytes": 40 * TOKEN, "disk": folder, "disk_bytes": 200 * TOKEN},
}


@pytest.fixture(params=sorted(TIERS))
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return TIERS[request.param](tmp_path)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 360) for _ in range(count)]


def forced(seed: int, count: int = 4) -> Sampling:
    return Sampling(forced_token_ids=tuple(tokens(seed, count)), seed=seed)


def chain(engine: Engine) -> list[MessageHandle]:
    """Messages each of which has seen those before it, at odd places."""
    made: list[MessageHandle] = []
    for number in range(4):
        offsets = [37 * i for i in range(len(made))]
        if number % 2:
            made.append(engine.decode(tokens(number, 20), made, offsets, 200, sampling=forced(number, 12)))
        else:
            made.append(engine.prefill(tokens(number, 32), made, offsets, 200))
    return made


def fill(engine: Engine, rounds: int = 3) -> None:
    """Push out whatever is idle."""
    for seed in range(rounds):
        with engine.scope():
            engine.prefill(tokens(100 + seed, 250))


def probe(engine: Engine, view: list[MessageHandle], seed: int) -> None:
    engine.decode([7], view, sampling=Sampling(forced_token_ids=(5, 6, 7, 8, 9, 10), seed=seed))


def require_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    error = (torch.stack(one) - torch.stack(other)).abs().max().item()
    assert error <= 1e-4, f"logits differ by {error}"


def test_evicted_messages_come_back_with_the_same_logits(
    make_engine: MakeEngine, tiers: dict[str, Any], logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    large = make_engine()
    probe(large, chain(large)[::-1], 900)
    small = make_engine(kv_budget_bytes=SMALL, **tiers)
    made = chain(small)
    fill(small)
    assert small.stats().evicted >= 3
    probe(small, made[::-1], 901)
    require_close(logits_by_seed[900], logits_by_seed[901])
    stats = small.stats()
    assert stats.recomputed + stats.restored_from_host + stats.restored_from_disk >= 3
    small.check()


def test_what_a_lost_message_has_seen_is_computed_again_even_if_it_was_released(
    make_engine: MakeEngine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    for seed, options in ((910, {}), (911, {"kv_budget_bytes": SMALL})):
        engine = make_engine(**options)
        made = chain(engine)
        for handle in made[:-1]:
            engine.release(handle)
        fill(engine)
        probe(engine, [made[-1]], seed)
        assert engine.stats().messages == 2
        engine.check()
    assert engine.stats().recomputed == 4, "the message and the three that it has seen"
    require_close(logits_by_seed[910], logits_by_seed[911])


def test_each_tier_does_its_part(make_engine: MakeEngine, tmp_path: Path) -> None:
    def after(**options: Any) -> Any:
        engine = make_engine(kv_budget_bytes=SMALL, **options)
        made = chain(engine)
        fill(engine)
        probe(engine, made, 0)
        return engine.stats()

    lost, host, disk = after(), after(host_bytes=1 << 30), after(disk=tmp_path)
    assert lost.recomputed >= 3 and lost.restored_from_host == lost.restored_from_disk == 0 and lost.lost >= 3
    assert host.restored_from_host >= 3 and host.recomputed == host.restored_from_disk == host.lost == 0
    assert disk.restored_from_disk + disk.restored_from_host >= 3 and disk.recomputed == disk.lost == 0
    assert lost.tokens_encoded == host.tokens_encoded == disk.tokens_encoded
    assert lost.tokens_recomputed > host.tokens_recomputed == disk.tokens_recomputed == 0


def test_a_parked_scope_gives_the_pool_back_and_goes_on_as_if_nothing_had_happened(
    make_engine: MakeEngine, tiers: dict[str, Any], logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    engine = make_engine(**tiers)
    kept = engine.prefill(tokens(50, 30))
    with engine.scope() as scope:
        made = chain(engine)
        probe(engine, made, 920)
        before = engine.stats().kv_bytes
        engine.kv.offload(scope)
        assert engine.stats().kv_bytes == engine._core.pool.rounded(30) * TOKEN < before
        probe(engine, made, 921)
        with engine.scope():
            inner = engine.prefill(tokens(51, 16))
            engine.kv.offload(scope)
            assert engine.stats().kv_bytes == engine._core.pool.rounded(30) * TOKEN, "what inner scopes lease, too"
            assert engine.tokens(inner) == tokens(51, 16)
    require_close(logits_by_seed[920], logits_by_seed[921])
    engine.kv.offload()
    assert engine.stats().kv_bytes == 0
    probe(engine, [kept], 922)
    engine.release(kept)
    assert engine.stats().host_bytes == engine.stats().disk_bytes == 0


def test_space_is_freed_when_its_messages_are_released(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(disk=tmp_path)
    made = [engine.prefill(tokens(seed, 20)) for seed in range(3)]
    engine.kv.offload()
    wait_until(lambda: engine.stats().disk_bytes == 3 * 20 * TOKEN)
    for handle in made:
        engine.release(handle)
    space = spill_of(engine).space
    assert engine.stats().disk_bytes == 0 and space.free_blocks == space.blocks


def spill_of(engine: Engine) -> SpillFile:
    assert engine._core._disk.spill is not None
    return engine._core._disk.spill


def test_what_cannot_be_read_from_disk_is_computed_again(
    make_engine: MakeEngine, tmp_path: Path, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    engine = make_engine(disk=tmp_path)
    one, other = engine.prefill(tokens(1, 20)), engine.prefill(tokens(2, 20))
    probe(engine, [one, other], 930)
    engine.kv.offload([one, other])
    wait_until(lambda: engine.stats().host_bytes == 0)
    spill_of(engine).file.truncate(30 * TOKEN)
    probe(engine, [one, other], 931)
    require_close(logits_by_seed[930], logits_by_seed[931])
    assert engine.stats().recomputed == 1 and engine.stats().restored_from_disk == 1


def test_a_pinned_message_stays_and_one_unpinned_too_often_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=SMALL)
    held = engine.prefill(tokens(1, 64), author="alice")
    engine.kv.pin(held)
    engine.kv.offload()
    with engine.scope():
        engine.prefill(tokens(2, 190))
    probe(engine, [held], 0)
    assert engine.stats().recomputed == 0
    engine.kv.unpin(held)
    engine.kv.offload()
    assert engine.stats().kv_bytes == 0
    with pytest.raises(InvalidRequestError, match="unpinned more often"):
        engine.kv.unpin(held)


def test_pins_that_leave_no_room_fail_a_call_and_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=SMALL)
    held = engine.prefill(tokens(1, 128), author="alice")
    engine.kv.pin(held)
    with pytest.raises(CapacityError, match="pinned by 'alice'"):
        engine.prefill(tokens(2, 200))
    assert engine.prefill(tokens(3, 64)).length == 64


async def test_calls_that_want_each_others_room_wait_for_it(make_engine: MakeEngine, tiers: dict[str, Any]) -> None:
    """Sixteen branches over their own evicted messages, in a pool that holds two of them at a time."""
    engine = make_engine(kv_budget_bytes=SMALL, **tiers)
    made = [engine.prefill(tokens(seed, 60)) for seed in range(16)]
    shared = engine.prefill(tokens(99, 30))
    calls = [engine.adecode([7], [shared, own], sampling=forced(seed, 8)) for seed, own in enumerate(made)]
    handles = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert [engine.tokens(handle)[1:] for handle in handles] == [tokens(seed, 8) for seed in range(16)]


async def test_cancelling_a_call_whose_messages_are_being_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=SMALL, max_batched_tokens=4)
    made = chain(engine)
    engine.kv.offload()
    task = asyncio.create_task(engine.adecode([7], made, sampling=forced(1)))
    while engine.stats().unfinished < 2:
        await asyncio.sleep(0)
    task.cancel()
    while engine.stats().unfinished:
        await asyncio.sleep(0)
    engine.check()
    probe(engine, made, 2)
    for handle in made:
        engine.release(handle)
    assert engine.stats().kv_bytes == TOKEN * engine._core.pool.rounded(7)


def test_a_failed_step_fails_the_call_that_waited_for_a_message_to_be_computed_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    made = chain(engine)
    engine.kv.offload()
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.loop.executor, "run", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            engine.decode([7], made, sampling=forced(1))
    engine.check()
    probe(engine, made, 2)


def test_two_calls_for_one_lost_message_compute_it_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    lost = engine.prefill(tokens(1, 40))
    engine.kv.offload()
    before = engine.stats().tokens_encoded
    said = engine.decode([Decode([7], [lost], sampling=forced(seed, 3)) for seed in range(5)])
    assert engine.stats().recomputed == 1 and engine.stats().tokens_recomputed == 40
    assert engine.stats().tokens_encoded - before == 5 * 4
    assert [engine.usage(each).tokens_recomputed for each in said] == [40, 0, 0, 0, 0], "the first submitted"
    assert [engine.usage(each).tokens_reused for each in said] == [0, 40, 40, 40, 40]


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_file_of_the_same_message_at_another_place_is_not_taken_for_it(
    make_engine: MakeEngine, tmp_path: Path, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    """Ids know relative places only, keys are stored as rotated: the neighbour's file is of another position."""
    text = tokens(1, 20)
    neighbour, engine = make_engine(disk=tmp_path, salt="s"), make_engine(disk=tmp_path, salt="s")
    plain = make_engine()
    assert neighbour.prefill(text) == engine.prefill(text, position=100)
    for each in (neighbour, engine):
        each.kv.offload()
        wait_until(lambda each=each: each.stats().host_bytes == 0)
    for seed, each in enumerate((engine, plain)):
        sampling = Sampling(forced_token_ids=(5, 6, 7), seed=seed)
        each.decode([7], [each.prefill(text, position=100)], [0], 40, sampling=sampling)
    assert engine.stats().restored_from_disk == 1
    assert (torch.stack(logits_by_seed[0]) - torch.stack(logits_by_seed[1])).abs().max() <= 1e-4


def test_closing_ends_the_engines_own_file_and_no_other(make_engine: MakeEngine, tmp_path: Path) -> None:
    mine, other = make_engine(disk=tmp_path), make_engine(disk=tmp_path)
    made = mine.prefill(tokens(1, 20)), other.prefill(tokens(2, 20))
    for engine in (mine, other):
        engine.kv.offload()
        wait_until(lambda engine=engine: engine.stats().host_bytes == 0)
    before = spill_of(mine).file
    mine.admin.restart()
    assert before.closed and mine.kv.tiers(made[:1]) == ["lineage"] and other.kv.tiers(made[1:]) == ["disk"]
    other.close()
    assert spill_of(other).file.closed and not list(tmp_path.iterdir())


def test_waiting_for_a_slow_disk_does_not_stop_the_engine(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More leaves for the disk than may be on its way, while a reader waits for the disk: neither blocks the other."""
    monkeypatch.setattr(entry_files, "_UNWRITTEN_BYTES", 20 * TOKEN)
    engine = make_engine(disk=tmp_path)
    first = engine.prefill(tokens(1, 30))
    engine.kv.offload()
    wait_until(lambda: engine.stats().host_bytes == 0)
    slow = threading.Event()
    get = SpillFile.read
    monkeypatch.setattr(SpillFile, "read", lambda *a: (slow.wait(0.2) and None) or get(*a))
    others = [engine.prefill(tokens(seed, 30)) for seed in range(2, 6)]
    answers: list[MessageHandle] = []
    reader = threading.Thread(target=lambda: answers.append(engine.decode([7], [first], sampling=forced(9))))
    reader.start()
    parker = threading.Thread(target=engine.kv.offload)
    parker.start()
    for thread in (reader, parker):
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(answers) == 1 and len(others) == 4


def test_failing_to_copy_leaks_nothing(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(host_bytes=1 << 20)
    one = engine.prefill(tokens(1, 30))
    engine.kv.offload()
    used = engine.stats().kv_bytes
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.pool, "fill", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(EngineFailedError):
                engine.decode([7], [one], sampling=forced(1))
    assert engine.stats().kv_bytes == used == 0
    engine.decode([7], [one], sampling=forced(1))
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.pool, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.kv.offload()
    engine.check()
    engine.kv.offload()
    assert engine.stats().kv_bytes == 0


def test_what_was_read_from_disk_for_nobody_is_not_kept(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(disk=tmp_path)
    made = [engine.prefill(tokens(seed, 30)) for seed in range(4)]
    engine.kv.offload()
    wait_until(lambda: engine.stats().host_bytes == 0)
    get = SpillFile.read
    monkeypatch.setattr(SpillFile, "read", lambda *a: (time.sleep(0.1), get(*a))[1])
    for handle in made:
        with pytest.raises(RequestTimeoutError):
            engine.decode([7], [handle], sampling=forced(1), timeout_s=0.02)
    time.sleep(0.6)
    assert engine.stats().host_bytes == 0 and engine.stats().disk_bytes == 4 * 30 * TOKEN
    engine.check()


def test_a_scope_that_ends_after_the_engine_was_closed_is_in_nobodys_way(make_engine: MakeEngine, tmp_path) -> None:
    engine = make_engine(disk=tmp_path)
    with pytest.raises(KeyError, match="mine"), engine.scope():
        engine.prefill(tokens(1, 30))
        engine.kv.offload()
        wait_until(lambda: engine.stats().host_bytes == 0)
        engine.close()
        raise KeyError("mine")
    assert engine.stats().leases == 0
    engine.check()


def test_a_decode_repeated_after_its_kv_was_lost_keeps_the_new_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    call = Sampling(max_tokens=8, stop_tokens=(), seed=3, logprobs=2)
    answer = engine.decode(tokens(1, 20), sampling=call)
    engine.kv.offload()
    assert engine.decode(tokens(1, 20), sampling=call.model_copy(update={"logprobs": None})) == answer
    assert engine.stats().kv_bytes > 0
    before = engine.stats().tokens_encoded
    engine.decode([7], [answer], sampling=forced(1, 1))
    assert engine.stats().tokens_encoded == before + 2 and engine.stats().recomputed == 0
    assert engine.logprobs(answer)[0].logprob is not None


def test_memory_counts_what_the_disk_really_holds(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(disk=tmp_path, disk_bytes=100 * TOKEN)
    made = [engine.prefill(tokens(seed, 40)) for seed in range(8)]
    engine.kv.offload()
    wait_until(lambda: engine.stats().host_bytes == 0)
    assert engine.stats().disk_bytes == 2 * 40 * TOKEN and spill_of(engine).space.free_blocks == 20
    assert os.fstat(spill_of(engine).file.fileno()).st_size <= 100 * TOKEN
    assert engine.kv.tiers(made) == ["lineage"] * 6 + ["disk"] * 2
    assert engine.stats().lost == 6 and len(made) == 8
