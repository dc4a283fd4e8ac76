"""Who leaves memory first, and who is told of a first token: what other tests would not notice if it changed."""

from __future__ import annotations

import torch
from conftest import MakeEngine

from choreo_agents import Decode, MessageHandle, Sampling
from choreo_agents.kv.cache import HostedEntries
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import EventList, FirstToken

TOKEN = 2 * 3 * 2 * 16 * 4


def evict(engine: object, tokens: int) -> None:
    core = engine._core  # type: ignore[attr-defined]
    with core.lock:
        core.cache.evict(core.pool.free_tokens + tokens)


def test_attack_the_least_recently_used_message_leaves_the_pool_first(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=16 * 16 * TOKEN, host_bytes=1 << 22)
    made: list[MessageHandle] = [engine.prefill([5 + number] * 16) for number in range(5)]
    # Read again, in another order than they were made in.
    for number in (1, 4, 0, 3, 2):
        engine.release(engine.decode([7], [made[number]], sampling=Sampling(forced_token_ids=(9,))))
    left: list[int] = []
    for _ in made:
        evict(engine, 1)
        there = engine.kv.tiers(made)
        left += [number for number, tier in enumerate(there) if tier != "device" and number not in left]
    assert left == [1, 4, 0, 3, 2]


def test_attack_what_a_waiting_call_is_to_read_leaves_the_pool_last(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=16 * 16 * TOKEN, host_bytes=1 << 22)
    made = [engine.prefill([5 + number] * 16) for number in range(4)]
    table = engine._core.table
    wanted = engine._tenant.find(made[0])
    with engine._core.lock:
        table.want(wanted)
    try:
        for left in range(1, 4):
            evict(engine, 1)
            assert engine.kv.tiers(made) == ["device"] + ["host"] * left + ["device"] * (3 - left)
        evict(engine, 1)
        assert engine.kv.tiers(made) == ["host"] * 4
    finally:
        with engine._core.lock:
            table.unwant(wanted)


def test_attack_the_oldest_leaves_the_host_first() -> None:
    kv = HostKV(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4))
    tier, (a, b, c, d, e) = HostedEntries(3 * kv.nbytes), (CacheEntry(key, 4, 0) for key in "abcde")
    for entry in (a, b, c):
        assert tier.put(entry, kv) == []
    assert tier.take(a) is kv and tier.put(a, kv) == []
    assert [entry for entry, _ in tier.put(d, kv)] == [b]
    double = HostKV(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4))
    assert [entry for entry, _ in tier.put(e, double)] == [c, a]
    tier.check()


def test_attack_the_oldest_leaves_the_host_of_an_engine_first(make_engine: MakeEngine) -> None:
    engine = make_engine(host_bytes=40 * TOKEN)
    made = [engine.prefill([5 + number] * 16) for number in range(3)]
    for handle in (made[1], made[0], made[2]):
        engine.kv.offload([handle])
    assert engine.kv.tiers(made) == ["host", "lineage", "host"]


def test_attack_a_first_token_is_told_once_for_each_decode(make_engine: MakeEngine) -> None:
    events = EventList()
    engine = make_engine(sink=events)
    engine.prefill([5] * 20)
    engine.decode([Decode([7 + number], sampling=Sampling(max_tokens=6, stop_tokens=())) for number in range(3)])
    first = [event.request_id for event in events.events if isinstance(event, FirstToken)]
    assert len(first) == len(set(first)) == 3
