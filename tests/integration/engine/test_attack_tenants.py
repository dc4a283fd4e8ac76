"""What a tenant can learn of others, and take from them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import MakeEngine

from choreo_agents import Decode, Engine, Sampling
from choreo_agents.errors import ChoreoError

TEXT = list(range(20, 53))
SHORT = Sampling(max_tokens=4, stop_tokens=())
LONG = Sampling(max_tokens=200, stop_tokens=())
SUMS = ("tokens_encoded", "tokens_reused", "tokens_recomputed", "tokens_mapped", "kv_bytes_read", "kv_bytes_unshared")
SUMS += ("finished", "cancelled", "failed", "unfinished", "messages", "leases", "kv_bytes", "host_bytes", "disk_bytes")
SUMS += ("evicted", "restored_from_host", "restored_from_disk", "lost", "recomputed", "rows")


def work(engine: Engine, seed: int = 1, *, kv_is_here: bool = True) -> None:
    """Calls of all kinds that are counted; KV is read only where it is in this process."""
    choreo = engine.method == "choreo"
    root = engine.prefill(TEXT[seed:], author="ann")
    engine.prefill(TEXT[seed:])
    lazy = engine.prefill([9, seed], [root], lazy=True)
    engine.decode([Decode([7, seed], [root, lazy], sampling=Sampling(max_tokens=3, n=2, seed=seed, stop_tokens=()))])
    with pytest.raises(ChoreoError):
        engine.decode([7], [root], sampling=LONG, timeout_s=0.0)
    engine.kv.offload()
    written(engine)  # else it is the disk's speed that says whether it comes back from there, or from the host still
    if choreo and kv_is_here:
        engine.kv.pin(root)
        engine.kv.read(root)
        engine.kv.unpin(root)
    engine.release(engine.decode([7], [root], sampling=SHORT))


def written(engine: Engine) -> None:
    """Wait until the disk has done what was asked of it: what is on its way there is on the host still."""
    with engine._core.lock:
        wait([entry.writing for entry in engine._core.cache.entries_of(None) if entry.writing is not None])


def seen(engine: Engine) -> tuple[Any, Any]:
    written(engine)
    return asdict(engine.stats()), engine.kv.memory_map().as_object()


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
@pytest.mark.parametrize("tiers", ["host", "disk", "none"])
def test_an_attack_on_counters_sees_its_own_only(
    make_engine: MakeEngine, tmp_path: Path, method: str, tiers: str
) -> None:
    """Whatever a victim does, before, between and after: stats and memory map of a spy are as without it."""
    found = []
    for name in ("alone", "watched"):
        folder = tmp_path / f"{method} {tiers} {name}"
        memory = {"host": {"host_bytes": 1 << 20}, "disk": {"disk": folder}, "none": {}}[tiers]
        engine = make_engine(method=method, **memory)
        spy, victim = engine.tenant("spy"), engine.tenant("victim")
        acts: list[Callable[[], object]] = [
            partial(victim.prefill, TEXT),
            partial(work, victim),
            partial(work, engine),
            victim.close,
        ]
        if name == "alone":
            acts = [partial(list)] * 4
        notes = []
        acts[0]()
        notes.append(seen(spy))
        work(spy, 2)
        acts[1]()
        notes.append(seen(spy))
        acts[2]()
        notes.append(seen(spy))
        acts[3]()
        notes.append(seen(spy))
        found.append(notes)
    assert found[0] == found[1]


def test_what_all_tenants_did_is_what_the_owner_sees(make_engine: MakeEngine, pytestconfig: pytest.Config) -> None:
    engine = make_engine(host_bytes=1 << 20)
    tenants = [engine, *(engine.tenant(salt) for salt in "abc")]
    working = partial(work, kv_is_here=not pytestconfig.getoption("--engine", None))
    with ThreadPoolExecutor(len(tenants)) as threads:
        assert [*threads.map(working, tenants, range(len(tenants)))] == [None] * len(tenants)
    assert engine.admin is not None
    own, whole = [tenant.stats() for tenant in tenants], engine.admin.stats()
    for count in SUMS:
        assert sum(getattr(stats, count) for stats in own) == getattr(whole, count), count
    assert all(0 < stats.steps <= whole.steps for stats in own)
    assert engine.admin.memory_map().authors["ann"].messages == 4 and len(engine.kv.memory_map().authors) > 0
    gone = own[1].tokens_encoded
    tenants[1].close()
    assert engine.admin.stats().tokens_encoded == whole.tokens_encoded
    assert engine.tenant("a").stats().tokens_encoded == 0 < gone


async def test_steps_that_are_shared_count_as_each_ones_own(make_engine: MakeEngine) -> None:
    """A step tells its rows' tenants of their rows alone, and never how many others there were."""
    engine = make_engine()
    one, two = engine.tenant("a"), engine.tenant("b")
    await asyncio.gather(
        *(two.adecode([7, 8], sampling=Sampling(max_tokens=40, seed=i, stop_tokens=())) for i in range(5)),
        one.adecode([7], sampling=Sampling(max_tokens=20, seed=3, stop_tokens=())),
    )
    stats = one.stats()
    assert (stats.rows_per_step, stats.rows_per_decode_step, stats.unfinished_per_decode_step) == (1.0, 1.0, 1.0)
    assert (stats.steps, stats.decode_rows, stats.tokens_encoded) == (21, 20, 21)
    assert engine.admin is not None and engine.admin.stats().rows_per_decode_step > 2
    assert engine.stats().steps == 0 == engine.stats().kv_bytes


def steps_of(use: Callable[[], object]) -> int:
    """Count what Python does in a call, by its bytecodes."""
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use()
    finally:
        sys.settrace(before)
    return steps


def test_what_others_keep_makes_nobodys_stats_dearer(make_engine: MakeEngine, tmp_path: Path) -> None:
    """On the device, on the host and on disk, and in threads."""
    engine = make_engine(host_bytes=1 << 18, disk=tmp_path)
    mine, others = engine.tenant("mine"), engine.tenant("others")
    mine.prefill(TEXT)
    steps, held = [], []
    for number in range(64):
        with others.threads.speaking(f"{number}"):
            others.prefill([number + 5, *TEXT])
        others.kv.offload()
        if number in (3, 63):
            written(engine)
            held.append(others.stats())
            steps.append(steps_of(mine.stats))
    assert held[0].host_bytes and held[1].disk_bytes
    assert held[1].threads == 64
    assert steps[0] == steps[1] > 0


def test_attack_what_all_have_computed_together_is_told_to_the_owner_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many steps were begun ahead, and which sizes of passes captured, grows with what others do."""
    engine = make_engine()
    known = replace(engine._core.execution.computing(), graphs=3, steps_ahead=9)
    monkeypatch.setattr(engine._core.execution, "computing", lambda: known)
    every, own = engine.admin.stats(), engine.tenant("spy").stats()
    assert (every.graphs, every.steps_ahead) == (3, 9) and (own.graphs, own.steps_ahead) == (0, 0)
    assert own.backend == every.backend


def test_only_the_owner_does_what_concerns_all(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.tenant("a") as tenant:
        assert tenant.admin is None and tenant.tenant("b").admin is None
        tenant.prefill(TEXT)
    assert engine.prefill(TEXT).length == 33, "leaving a tenancy closes nothing else"


def test_nothing_is_kept_of_a_tenant_that_has_left_though_it_is_asked_for(engine: Engine) -> None:
    for number in range(3):
        tenant = engine.tenant(f"guest {number}")
        tenant.prefill(TEXT)
        tenant.close()
        assert tenant.stats().tokens_encoded == 0
    assert engine.admin.stats().tokens_encoded == 3 * len(TEXT)
    core = engine._core
    assert len(core.counters._own) <= 1 and len(core.tier_counters._own) <= 1


@pytest.mark.parametrize("method", ["choreo", "baseline"])
@pytest.mark.parametrize("salts", ["ab", "ba"])
def test_attack_a_first_token_encodes_as_much_as_if_nobody_had_asked_before(
    make_engine: MakeEngine, method: str, salts: str
) -> None:
    """What a prompt costs tells a tenant nothing of others, in either direction: counted, of one prompt for all."""
    engine = make_engine(method=method)
    assert engine.admin is not None

    def encoded(salt: str) -> int:
        before, tenant = engine.admin.stats().tokens_encoded, engine.tenant(salt)
        tenant.decode([7], [tenant.prefill(TEXT)], sampling=Sampling(max_tokens=1, stop_tokens=()))
        return engine.admin.stats().tokens_encoded - before

    cold = encoded(salts[0])
    assert encoded(salts[1]) == cold > len(TEXT), "as much as the first, though its prompt is the first's"
    assert encoded(salts[0]) == encoded(salts[1]) < cold, "each finds its own"
