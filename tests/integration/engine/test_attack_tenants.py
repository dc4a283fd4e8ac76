"""What a tenant can learn of others, and take from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import HoldSteps, MakeEngine
from support.stepping import until

from choreo_agents import Decode, Engine, Prefill, Quota, Sampling
from choreo_agents.errors import CapacityError, ChoreoError, InvalidRequestError, KVBudgetError, QuotaError

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
TEXT = list(range(20, 53))
SHORT = Sampling(max_tokens=4, stop_tokens=())
LONG = Sampling(max_tokens=200, stop_tokens=())
SUMS = ("tokens_encoded", "tokens_reused", "tokens_recomputed", "tokens_mapped", "kv_bytes_read", "kv_bytes_read_alone")
SUMS += ("finished", "cancelled", "failed", "unfinished", "messages", "leases", "kv_bytes", "host_bytes", "disk_bytes")
SUMS += ("evicted", "restored_from_host", "restored_from_disk", "lost", "recomputed", "adopted", "rows")


def work(engine: Engine, seed: int = 1, *, kv_is_here: bool = True) -> None:
    """Of all kinds that are counted; KV is read and adopted only where it is in this process."""
    choreo = engine.method == "choreo"
    root = engine.prefill(TEXT[seed:], author="ann")
    engine.prefill(TEXT[seed:])
    lazy = engine.prefill([9, seed], [root], lazy=True)
    engine.decode([Decode([7, seed], [root, lazy], sampling=Sampling(max_tokens=3, n=2, seed=seed, stop_tokens=()))])
    with pytest.raises(ChoreoError):
        engine.decode([7], [root], sampling=LONG, timeout_s=0.0)
    engine.kv.park()
    written(engine)  # else it is the disk's speed that says whether it comes back from there, or from the host still
    if choreo and kv_is_here:
        engine.kv.pin(root)
        kv = engine.kv.read(root)
        engine.kv.unpin(root)
        engine.kv.adopt(
            Prefill([*TEXT[seed:]][:30], new_offset=seed), type(kv)(kv.keys[:, :, :30], kv.values[:, :, :30])
        )
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
    assert engine.owner is not None
    own, whole = [tenant.stats() for tenant in tenants], engine.owner.stats()
    for count in SUMS:
        assert sum(getattr(stats, count) for stats in own) == getattr(whole, count), count
    assert all(0 < stats.steps <= whole.steps for stats in own)
    assert engine.owner.memory_map().authors["ann"].messages == 4 and len(engine.kv.memory_map().authors) > 0
    gone = own[1].tokens_encoded
    tenants[1].close()
    assert engine.owner.stats().tokens_encoded == whole.tokens_encoded
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
    assert engine.owner is not None and engine.owner.stats().rows_per_decode_step > 2
    assert engine.stats().steps == 0 == engine.stats().kv_bytes


def test_only_the_owner_does_what_concerns_all(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.tenant("a") as tenant:
        assert tenant.owner is None and tenant.tenant("b").owner is None
        tenant.prefill(TEXT)
    assert engine.prefill(TEXT).length == 33, "leaving a tenancy closes nothing else"


def test_nothing_is_kept_of_a_tenant_that_has_left_though_it_is_asked_for(engine: Engine) -> None:
    for number in range(3):
        tenant = engine.tenant(f"guest {number}")
        tenant.prefill(TEXT)
        tenant.close()
        assert tenant.stats().tokens_encoded == 0
    assert engine.owner.stats().tokens_encoded == 3 * len(TEXT)
    core = engine._core
    assert len(core.counters._own) <= 1 and len(core.movements._own) <= 1


# Quotas


def pool(tokens: int) -> Quota:
    return Quota(pool_bytes=tokens * TOKEN)


def test_a_quota_is_checked_and_shown(make_engine: MakeEngine) -> None:
    for wrong in ({"pool_bytes": 0}, {"requests": 0}, {"pinned_bytes": -1}, {"starts_per_s": 0.0}, {"calls": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Quota(**wrong)
    engine = make_engine()
    tenant = engine.tenant("a", quota=pool(64))
    assert tenant.stats().kv_budget_bytes == 64 * TOKEN == tenant.kv.memory_map().budgets["device"]
    assert engine.tenant("b").stats().kv_budget_bytes == engine.stats().kv_budget_bytes == 1 << 23
    assert engine.tenant("a").stats().kv_budget_bytes == 64 * TOKEN, "as before, until another is given"
    engine.tenant("a", quota=Quota())
    assert tenant.stats().kv_budget_bytes == 1 << 23


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_a_call_that_can_never_fit_a_quota_is_refused_for_good(make_engine: MakeEngine, method: str) -> None:
    tenant = make_engine(method=method).tenant("a", quota=pool(64))
    root = tenant.prefill(TEXT[:30])
    with pytest.raises(KVBudgetError, match=r"the tenant may have 64: .*Quota\(pool_bytes"):
        tenant.decode([7], [root], sampling=Sampling(max_tokens=60, stop_tokens=()))
    assert tenant.decode([7], [root], sampling=SHORT).length == 5
    assert tenant.stats().unfinished == 0


def test_a_tenant_that_fills_its_quota_evicts_its_own(make_engine: MakeEngine) -> None:
    """And never anybody else's: the least recently used of its own first."""
    engine = make_engine(host_bytes=1 << 22)
    others = [engine.prefill([seed] * 16) for seed in range(5, 15)]
    tenant = engine.tenant("a", quota=pool(64))
    made = [tenant.prefill([seed] * 16) for seed in range(20, 40)]
    assert tenant.stats().kv_bytes <= 64 * TOKEN and tenant.stats().evicted == 16
    assert tenant.kv.tiers(made) == ["host"] * 16 + ["device"] * 4
    assert engine.kv.tiers(others) == ["device"] * 10 and engine.stats().evicted == 0
    tenant.kv.restore(made[:3])
    assert tenant.kv.tiers(made).count("device") <= 4 and tenant.kv.tiers(made)[:3] == ["device"] * 3
    assert tenant.decode([7], made[:2], sampling=SHORT).length == 5
    assert tenant.stats().kv_bytes <= 64 * TOKEN


def test_attack_short_messages_that_are_pinned_take_whole_blocks_of_a_quota(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tenant = engine.tenant("a", quota=Quota(pinned_bytes=48 * TOKEN))
    made = [tenant.prefill([seed]) for seed in range(20, 68)]
    for handle in made[:3]:
        tenant.kv.pin(handle)
    for handle in made[3:]:
        with pytest.raises(QuotaError, match="would be pinned"):
            tenant.kv.pin(handle)
    tenant.kv.park()
    assert tenant.stats().kv_bytes == 48 * TOKEN


async def test_calls_under_way_take_of_the_pool_what_they_may_need(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    """What several of them read counts once."""
    engine = make_engine()
    tenant = engine.tenant("a", quota=pool(32 + 3 * 112))
    root, free = tenant.prefill(TEXT[:32]), Sampling(max_tokens=100, stop_tokens=())
    steps = hold_steps(engine)
    running = [asyncio.create_task(tenant.adecode([7, i], [root], sampling=free)) for i in range(3)]
    await until(lambda: tenant.stats().unfinished == 3)
    with pytest.raises(QuotaError, match="wait for its calls"):
        await tenant.adecode([9], [root], sampling=SHORT)
    steps.go_on()
    for done in await asyncio.gather(*running):
        assert done.length == 102
    assert (await tenant.adecode([9], [root], sampling=SHORT)).length == 5
    assert tenant.stats().kv_bytes <= tenant.stats().kv_budget_bytes


def test_pins_count_to_both_quotas(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tenant = engine.tenant("a", quota=Quota(pool_bytes=96 * TOKEN, pinned_bytes=48 * TOKEN))
    one, two, three = (tenant.prefill([seed] * 16) for seed in (5, 6, 7))
    for handle in (one, two, three, three):
        tenant.kv.pin(handle)
    with pytest.raises(QuotaError, match="bytes would be pinned"):
        tenant.kv.pin(tenant.prefill([8] * 16))
    with pytest.raises(QuotaError, match="unpin messages"):
        tenant.decode([7], sampling=Sampling(max_tokens=60, stop_tokens=()))
    tenant.kv.unpin(one)
    tenant.kv.pin(tenant.prefill([8] * 16))
    assert tenant.decode([7], [one], sampling=SHORT).length == 5
    engine.kv.pin(engine.prefill([8] * 160))


@pytest.mark.parametrize("method", ["choreo", "naive"])
async def test_calls_under_way_are_counted_and_others_go_on(
    make_engine: MakeEngine, hold_steps: HoldSteps, method: str
) -> None:
    engine = make_engine(method=method)
    tenant, other = engine.tenant("a", quota=Quota(requests=2)), engine.tenant("b")
    root = tenant.prefill(TEXT)
    leases = tenant.stats().leases
    steps = hold_steps(engine)
    running = [asyncio.create_task(tenant.adecode([7, i], [root], sampling=LONG)) for i in range(2)]
    await until(lambda: tenant.stats().unfinished == 2)
    with pytest.raises(QuotaError, match=r"2 calls of the tenant are under way and it may have 2"):
        await tenant.adecode([9], sampling=SHORT)
    with pytest.raises(InvalidRequestError, match="3 calls in one batch"):
        await tenant.adecode([Decode([i], sampling=SHORT) for i in range(3)])
    assert tenant.stats().leases == leases, "a batch that is refused leaves nothing"
    assert (await tenant.aprefill(TEXT)) == root, "what is there needs no call"
    steps.go_on()
    assert (await other.adecode([9], sampling=SHORT)).length == 5
    for done in await asyncio.gather(*running):
        assert tenant.tokens(done)
    assert (await tenant.adecode([9], sampling=SHORT)).length == 5
    assert issubclass(QuotaError, CapacityError), "LangGraph may try again"


async def test_a_batch_that_a_quota_refuses_leaves_no_lease_and_stops_nobody(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine()
    tenant = engine.tenant("a", quota=Quota(requests=1))
    root = tenant.prefill(TEXT)
    steps = hold_steps(engine)
    running = asyncio.create_task(tenant.adecode([7], [root], sampling=LONG, memo="m"))
    await until(lambda: tenant.stats().unfinished)
    before = tenant.stats().leases
    batch = [Decode([7], [root], sampling=LONG, memo="m"), Decode([8], sampling=SHORT)]
    with pytest.raises(QuotaError):
        await tenant.adecode(batch)
    with pytest.raises(QuotaError):
        await tenant.aprefill([Prefill(TEXT), Prefill([5, 5])])
    assert tenant.stats().leases == before
    steps.go_on()
    assert (await running).length == 201
    engine.check()


def test_a_rate_that_is_taken_back_holds_nobody(make_engine: MakeEngine) -> None:
    tenant = make_engine().tenant("a", quota=Quota(starts_per_s=0.001))
    tenant.prefill(TEXT)
    tenant.tenant("a", quota=Quota(requests=5))
    assert [tenant.prefill([seed] * 4).length for seed in range(5, 10)] == [4] * 5
