"""KV that comes from elsewhere takes the room that there is, and is refused where there is none."""

from __future__ import annotations

import pytest
import torch
from conftest import MakeEngine
from remote_support.parcels import (
    NO_ROOM,
    TOKEN,
    arrived,
    known_by,
    same,
    sent,
    words,
)

from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV

Logits = dict[int, list[torch.Tensor]]


def test_what_no_call_waits_for_leaves_the_pool_for_it(make_engine: MakeEngine) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s", kv_budget_bytes=96 * TOKEN, host_bytes=1 << 20)
    idle = [there.prefill(words(20 + number, 32)) for number in range(3)]
    made = [here.prefill(words(number, 32)) for number in range(2)]
    known_by(there, here, made)
    assert sent(here, there, made) == {}
    assert there.kv.tiers([*idle, *made]) == ["host", "host", "device", "device", "device"]
    assert (there.stats().evicted, there.stats().lost) == (2, 0)


def test_what_has_no_room_goes_to_the_host_or_is_refused_and_pushes_nothing_out_that_came_with_it(
    make_engine: MakeEngine,
) -> None:
    here = make_engine(salt="s")
    there = make_engine(salt="s", host_bytes=70 * TOKEN, kv_budget_bytes=64 * TOKEN)
    made = [here.prefill(words(number, 32)) for number in range(6)]
    known_by(there, here, made)
    refused = sent(here, there, made)
    assert refused == dict.fromkeys([each.id for each in made[4:]], NO_ROOM)
    assert there.kv.tiers(made) == ["device"] * 2 + ["host"] * 2 + ["lineage"] * 2
    assert all(same(there.kv.read(handle), here.kv.read(handle)) for handle in made[:4])
    assert (there.stats().recomputed, arrived(there)) == (0, (0, 128 * TOKEN))
    assert there.stats().kv_bytes <= 64 * TOKEN


def test_what_is_pinned_stays_and_what_is_larger_than_all_is_refused(make_engine: MakeEngine) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s", kv_budget_bytes=64 * TOKEN)
    pinned = there.prefill(words(9, 40))
    there.kv.pin(pinned)
    made = [here.prefill(words(1, 40)), here.prefill(words(2, 65)), here.prefill(words(3, 16))]
    known_by(there, here, made)
    assert sent(here, there, made) == dict.fromkeys([each.id for each in made[:2]], NO_ROOM)
    assert there.kv.tiers([pinned, *made]) == ["device", "lineage", "lineage", "device"]
    there.kv.unpin(pinned)
    assert sent(here, there, made[:1]) == {}, "it may be sent again"


def test_what_is_lost_again_before_all_have_come_is_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = [here.prefill(words(number)) for number in range(2)]
    known_by(there, here, made)
    write, written = KVPool.write, list[Segment]()

    def parking(pool: KVPool, segment: Segment, kv: HostKV) -> None:
        written.append(segment)
        if len(written) == 2:
            there.kv.offload([made[0]])
        write(pool, segment, kv)

    monkeypatch.setattr(KVPool, "write", parking)
    assert sent(here, there, made) == {made[0].id: NO_ROOM} and there.kv.tiers(made) == ["lineage", "device"]


def test_where_it_was_encoded_is_known_on_the_host_too(make_engine: MakeEngine) -> None:
    """What has been computed meanwhile at another place, and lost, is shown from where it is sent."""
    engine = make_engine(salt="s", host_bytes=30 * TOKEN)
    made, other = engine.prefill(words(1)), engine.prefill(words(2))
    kv, core = engine.kv.read(made), engine._core
    with core.lock:
        entry, second = (core.table.entry(engine._tenant.find(each)) for each in (made, other))
        core.cache.offload([entry])
        core.cache._host.take(entry)
        assert core.cache.put_below(entry, kv, 9) and engine.kv.key(made).native_offset == 9
        assert not core.cache.put_below(second, kv, 0), "there is room for one"
    assert engine.kv.tiers([made]) == ["host"] and same(engine.kv.read(made), kv)
