"""KV is copied out of an engine and into it while it runs steps, is read by others, starts again or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from remote_support.parcels import (
    NO_ROOM,
    SOON_S,
    TOKEN,
    Gate,
    arrived,
    beside,
    ended,
    heard,
    holding,
    known_by,
    require_nothing_wanted,
    same,
    sent,
    words,
)

from choreo_agents import Decode, Engine, MessageHandle, Sampling
from choreo_agents.engine import kv_packets as parcels_module
from choreo_agents.engine import persistent_kv as kept_module
from choreo_agents.engine.kv_packets import export_kv, import_kv
from choreo_agents.errors import EngineClosedError, EngineFailedError
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV
from choreo_agents.runtime import loop as loop_module
from choreo_agents.runtime.executor import StepRetry

Logits = dict[int, list[torch.Tensor]]


def test_steps_go_on_while_it_is_packed_and_what_is_copied_stays(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_engine(salt="s", kv_budget_bytes=128 * TOKEN)
    made = here.prefill(words(1, 64))
    bits = here.kv.read(made)
    gate = Gate(monkeypatch, KVPool, "read")
    thread, came = beside(lambda: export_kv(here._tenant, [made.id]))
    assert gate.inside.wait(SOON_S)
    # All leave that may: the slots of what is being copied are given to nobody.
    here.kv.offload()
    here.release(made)
    for number in range(4):
        with here.scope():
            here.prefill(words(10 + number, 60))
    gate.open.set()
    ended(thread)
    [[parcel]] = came
    monkeypatch.undo()
    assert parcel.id == made.id and here.kv.tiers([made]) == [None]
    there = make_engine(salt="s")
    assert there.prefill(words(1, 64), lazy=True) == made
    assert import_kv(there._tenant, [parcel]) == {} and same(there.kv.read(made), bits)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("looked_at", [False, True])
def test_what_a_call_has_computed_is_waited_for_and_nothing_else(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, looked_at: bool, fails: bool
) -> None:
    here = make_engine(salt="s")
    lazy, other = (here.prefill(words(number), lazy=True) for number in (1, 2))
    with monkeypatch.context() as patch:
        if fails:
            patch.setattr(StepRetry, "run", lambda *_: 1 / 0)
        gate = Gate(patch, StepRetry, "run")
        threads = [] if looked_at else [beside(lambda: here.decode([5], sampling=Sampling(forced_token_ids=(5,))))]
        if not looked_at:
            assert gate.inside.wait(SOON_S)  # until it is over nothing is looked at
        threads.append(beside(lambda: heard(here, [lazy], 70)))
        assert gate.inside.wait(SOON_S)
        while here.stats().unfinished < len(threads):
            pass
        packing, came = beside(lambda: export_kv(here._tenant, [other.id, lazy.id]))
        packing.join(0.1)
        assert packing.is_alive() and came == []
        gate.open.set()
        for thread in (packing, *(each for each, _ in threads)):
            ended(thread)
    assert [parcel.id for parcel in came[0]] == ([] if fails else [lazy.id])
    [answer] = threads[-1][1]
    assert isinstance(answer, EngineFailedError if fails else MessageHandle)
    if not fails:
        said = answer.length + (0 if looked_at else 2)
        assert (here.stats().tokens_encoded, here.stats().recomputed) == (24 + said, 0)
    require_nothing_wanted(here)


def test_who_copies_what_is_nowhere_is_nobody_it_is_computed_for(make_engine: MakeEngine) -> None:
    here = make_engine(salt="s")
    made = here.prefill(words(1))
    here.kv.offload()
    with here._core.lock:
        message = here._tenant.find(made)
        here._core.table.want(message)
    assert export_kv(here._tenant, [made.id]) == []
    with here._core.lock:
        here._core.table.unwant(message)
    assert here.stats().recomputed == 0


def test_steps_go_on_while_it_is_unpacked(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = here.prefill(words(1, 64))
    known_by(there, here, [made])
    parcels = export_kv(here._tenant, [made.id])
    gate = Gate(monkeypatch, KVPool, "fill")
    thread, came = beside(lambda: import_kv(there._tenant, parcels))
    assert gate.inside.wait(SOON_S)
    assert there.decode([7, 8], sampling=Sampling(forced_token_ids=(5, 6))) and there.kv.tiers([made]) == ["lineage"]
    gate.open.set()
    ended(thread)
    assert came == [{}] and same(there.kv.read(made), here.kv.read(made))


@pytest.mark.parametrize("held_up", ["open", "fill"])
def test_who_reads_it_meanwhile_has_it_computed_and_that_serves(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, held_up: str
) -> None:
    """It comes too late: the first encoding serves all."""
    # What is opened too late finds room for it only once.
    tokens = {"open": 96, "fill": 256}[held_up]
    here, there = make_engine(salt="s"), make_engine(salt="s", kv_budget_bytes=tokens * TOKEN, host_bytes=1 << 20)
    made = here.prefill(words(1, 64))
    known_by(there, here, [made])
    parcels = export_kv(here._tenant, [made.id])
    gate = Gate(monkeypatch, *{"fill": (KVPool, "fill"), "open": (parcels_module, "opened")}[held_up])
    thread, came = beside(lambda: import_kv(there._tenant, parcels))
    assert gate.inside.wait(SOON_S)
    heard(there, [made], 71)
    gate.open.set()
    ended(thread)
    assert came == [{}] and (there.stats().recomputed, arrived(there)) == (1, (0, 0))
    assert there.kv.tiers([made]) == ["device"]


@pytest.mark.parametrize("copied", ["packed", "unpacked", "read", "kept"])
def test_who_finds_no_room_for_a_copy_beside_steps_waits_for_its_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copied: str
) -> None:
    """What a copy takes is given back as soon as what runs, and nobody is told that it is pinned."""
    engine, other = make_engine(salt="s", kv_budget_bytes=96 * TOKEN, persist_dir=tmp_path), make_engine(salt="s")
    made = other.prefill(words(1, 64))
    if copied in ("packed", "read", "kept"):
        assert engine.prefill(words(1, 64)) == made
    else:
        known_by(engine, other, [made])
    parcels = export_kv(other._tenant, [made.id])
    acts: dict[str, Callable[[], Any]] = {
        "packed": lambda: export_kv(engine._tenant, [made.id]),
        "unpacked": lambda: import_kv(engine._tenant, parcels),
        "read": lambda: engine.kv.read(made),
        "kept": lambda: (engine.kv.persist([made]), engine.kv.flush()),
    }
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "DISK_PATIENCE_S", 10 * SOON_S)
        gate = Gate(patch, KVPool, "write" if copied == "unpacked" else "read")
        copying, done = beside(acts[copied])
        assert gate.inside.wait(SOON_S)
        calling, came = beside(lambda: engine.prefill(words(5, 64)))
        calling.join(0.1)
        assert calling.is_alive() and came == [] and engine.stats().unfinished == 1
        gate.open.set()
        ended(copying), ended(calling)
    assert isinstance(came[0], MessageHandle), came
    assert not isinstance(done[0], Exception) and engine._core.pool.borrowed == 0
    engine.check()


def test_it_comes_while_it_is_computed_for_somebody(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    """Who waits for it reads it, computed or sent; nothing is there twice."""
    here = make_engine(salt="s")
    made = [here.prefill(words(number, 64)) for number in range(4)]
    heard(here, made, 70)
    parcels = export_kv(here._tenant, [each.id for each in made])
    there = make_engine(salt="s", max_batched_tokens=4)
    known_by(there, here, made)
    thread, came = beside(lambda: heard(there, made, 71))
    for parcel in parcels:
        assert import_kv(there._tenant, [parcel]) == {}
    ended(thread)
    assert isinstance(came[0], MessageHandle)
    difference = torch.stack(logits_by_seed[70]) - torch.stack(logits_by_seed[71])
    assert difference.abs().max() <= 1e-4
    there.check()


def test_parcels_come_and_go_beside_decodes(make_engine: MakeEngine) -> None:
    """Both engines decode all the while, in pools that have no room for everything."""
    options: dict[str, Any] = {"salt": "s", "kv_budget_bytes": 320 * TOKEN, "host_bytes": 200 * TOKEN}
    here, there, plain = make_engine(**options), make_engine(**options), make_engine(salt="s")
    made = [here.prefill(words(number, 40)) for number in range(8)]
    wanted = {each.id: plain.kv.read(plain.prefill(words(number, 40))) for number, each in enumerate(made)}
    known_by(there, here, made)
    stop = threading.Event()

    def decodes(engine: Engine) -> int:
        count = 0
        while not stop.is_set():
            view = [made[(count + place) % 8] for place in range(2)]
            call = Decode([7, 8], view, sampling=Sampling(forced_token_ids=(5, 6, 7, 8)), idempotency_key=f"{count}")
            for handle in engine.decode([call, replace(call, header=[9, 9], idempotency_key=f"{count} too")]):
                engine.release(handle)
            count += 1
        return count

    threads = [beside(lambda engine=engine: decodes(engine)) for engine in (here, there)]
    moved = 0
    for turn in range(30):
        one, other = (here, there) if turn % 2 else (there, here)
        parcels = export_kv(one._tenant, [each.id for each in made])
        other.kv.offload(made[turn % 8 :][:3])
        refused = import_kv(other._tenant, parcels)
        assert set(refused.values()) <= {NO_ROOM}
        for parcel in parcels:
            moved += 1
            found = holding(one, parcel)
            assert (found.keys - wanted[parcel.id].keys).abs().max() <= 1e-4
    stop.set()
    for thread, came in threads:
        ended(thread)
        assert isinstance(came[0], int) and came[0] > 0, came
    assert moved > 30
    for engine in (here, there):
        engine.check()


def test_what_was_released_meanwhile_is_gone_when_it_has_come(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = here.prefill(words(1))
    scope = known_by(there, here, [made])
    parcels = export_kv(here._tenant, [made.id])
    gate = Gate(monkeypatch, KVPool, "fill")
    thread, came = beside(lambda: import_kv(there._tenant, parcels))
    assert gate.inside.wait(SOON_S)
    there._core.close_scope(scope)
    gate.open.set()
    ended(thread)
    assert came == [{}] and (there.stats().kv_bytes, there.stats().messages) == (0, 0)
    there.check()


@pytest.mark.parametrize(("when", "tokens"), [("opened", 64), ("opened", 16), ("write", 64), ("written", 64)])
def test_an_engine_that_starts_again_meanwhile_refuses_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: str, tokens: int
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s", kv_budget_bytes=tokens * TOKEN, host_bytes=1 << 20)
    made = here.prefill(words(1))
    known_by(there, here, [made])
    parcels = export_kv(here._tenant, [made.id])
    write = KVPool.write

    def then_again(*args: Any) -> None:
        write(*args)
        there.admin.restart()

    with monkeypatch.context() as patch:
        if when == "written":
            patch.setattr(KVPool, "write", then_again)
            came: list[Any] = [import_kv(there._tenant, parcels)]
        else:
            gate = Gate(patch, *((KVPool, when) if when == "write" else (parcels_module, when)))
            thread, came = beside(lambda: import_kv(there._tenant, parcels))
            assert gate.inside.wait(SOON_S)
            there.admin.restart()
            gate.open.set()
            ended(thread)
    if when == "write":
        assert isinstance(came[0], EngineClosedError), "its memory was given up"
    else:
        assert came == [{made.id: "the engine was restarted meanwhile: send it again"}]
    assert there.kv.tiers([made]) == ["lineage"] and arrived(there) == (0, 0)
    require_nothing_wanted(there)
    assert import_kv(there._tenant, parcels) == {}
    if tokens > made.length:
        assert same(there.kv.read(made), here.kv.read(made))


def test_an_engine_that_starts_again_while_it_is_packed_has_what_a_file_has(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = make_engine(salt="s", persist_dir=tmp_path)
    made, other = here.prefill(words(1)), here.prefill(words(2))
    bits = here.kv.read(made)
    here.kv.persist([made])
    here.kv.flush()
    awaited, waits = kept_module.awaited, [here.admin.restart]

    def late(*args: Any) -> Any:
        return waits.pop() if waits else awaited(*args)

    monkeypatch.setattr(kept_module, "awaited", late)
    [parcel] = export_kv(here._tenant, [made.id, other.id])
    assert parcel.id == made.id and same(holding(here, parcel), bits)
    assert (waits, here.stats().recomputed) == ([], 0)
    require_nothing_wanted(here)


@pytest.mark.parametrize("ending", ["engine", "tenancy"])
def test_nothing_is_packed_or_taken_once_it_was_closed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    core = make_engine()
    here, there = core.tenant("s"), make_engine(salt="s")
    made = there.prefill(words(1))
    scope = known_by(here, there, [made])
    parcels = export_kv(there._tenant, [made.id])
    gate = Gate(monkeypatch, KVPool, "fill")
    thread, came = beside(lambda: import_kv(here._tenant, parcels))
    assert gate.inside.wait(SOON_S)
    (core if ending == "engine" else here).close()
    gate.open.set()
    ended(thread)
    if ending == "tenancy":
        assert isinstance(came[0], EngineClosedError) and core._core.pool.live_segments() == 0
        assert core.admin.stats().received_bytes == 0
    for act in (lambda: export_kv(here._tenant, [made.id]), lambda: import_kv(here._tenant, parcels)):
        with pytest.raises(EngineClosedError):
            act()
    assert not scope.closed


def test_a_copy_that_fails_leaves_no_room_taken(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = [here.prefill(words(number)) for number in range(2)]
    known_by(there, here, made)
    with monkeypatch.context() as patch:

        def broken(pool: KVPool, segment: Segment, kv: HostKV, layer: int) -> None:
            raise RuntimeError("no such bus")

        patch.setattr(KVPool, "fill", broken)
        with pytest.raises(RuntimeError, match="no such bus"):
            sent(here, there, made)
    assert there._core.pool.live_segments() == 0 and arrived(there) == (0, 0)
    assert sent(here, there, made) == {}
    there.check()
