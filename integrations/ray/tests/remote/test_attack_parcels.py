"""A parcel is believed only as it left, by whoever has the tenant's key, for the very message that it is of."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from remote_support.parcels import (
    TOKEN,
    arrived,
    known_by,
    parcel_of,
    rows_of,
    with_a_bit_flipped,
    words,
)
from support.tiny import save_tiny_llama

from choreo_agents.engine.kv_packets import KVPacket, export_kv, import_kv
from choreo_agents.engine.lineage import ReadLog
from choreo_agents.engine.messages.message import Scope
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models import LoadedModel, load_model

Logits = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module")
def half(tiny_path: Path) -> LoadedModel:
    return load_model(tiny_path, dtype=torch.bfloat16)


class Pair:
    """Two engines, the second of which knows what the first has made, and nothing of its KV."""

    def __init__(self, make_engine: MakeEngine, **options: Any) -> None:
        self.here, self.there = make_engine(salt="s"), make_engine(salt="s", **options)
        root = self.here.prefill(words(1, 6), position=3)
        self.made = [root, self.here.prefill(words(2, 6), [root], [3], 12), self.here.prefill(words(3, 6))]
        known_by(self.there, self.here, self.made)
        self.parcels = export_kv(self.here._tenant, [each.id for each in self.made])

    def refuses(self, parcel: KVPacket) -> str:
        """Why the second does; nothing of the parcel is used."""
        before = [self.there._tenant.find(each).remembered() for each in self.made]
        refused = import_kv(self.there._tenant, [parcel])
        assert list(refused) == [parcel.id] and refused[parcel.id].startswith("its parcel ")
        assert self.there.kv.tiers(self.made) == ["lineage"] * 3 and arrived(self.there) == (0, 0)
        stats = self.there.stats()
        assert (stats.kv_bytes, stats.host_bytes) == (0, 0)
        after = [self.there._tenant.find(each).remembered() for each in self.made]
        assert [{**each, "entry": None} for each in after] == [{**each, "entry": None} for each in before]
        return refused[parcel.id].removeprefix("its parcel ")


@pytest.fixture
def pair(make_engine: MakeEngine) -> Pair:
    return Pair(make_engine)


CHANGED = "was changed, or signed with another key"
DAMAGED = "is truncated or damaged"


def test_attack_a_parcel_with_any_bit_flipped_is_refused(pair: Pair) -> None:
    parcel = pair.parcels[1]
    header = 8 + int.from_bytes(parcel.data[:8], "little")
    rng = random.Random(0)
    behind = [rng.randrange(8 * header, 8 * len(parcel.data)) for _ in range(200)]
    reasons = {pair.refuses(with_a_bit_flipped(parcel, bit)) for bit in [*range(8 * header), *behind]}
    assert {CHANGED, DAMAGED, "belongs to another message", "has KV of another shape or dtype"} <= reasons
    assert import_kv(pair.there._tenant, [parcel]) == {} and pair.there.kv.tiers(pair.made)[1] == "device"


def test_attack_a_parcel_that_is_cut_or_longer_is_refused(pair: Pair) -> None:
    parcel = pair.parcels[1]
    kv = parcel.nbytes
    for size in (0, 7, 8, 100, kv - 1):
        assert f"has {size} bytes for {kv} of KV" in pair.refuses(replace(parcel, data=parcel.data[:size]))
    for size in (kv, len(parcel.data) - 1):
        assert pair.refuses(replace(parcel, data=parcel.data[:size])) == DAMAGED
    assert pair.refuses(replace(parcel, data=parcel.data + b" ")) == DAMAGED
    assert "of KV, not" in pair.refuses(replace(parcel, data=parcel.data + bytes(1 << 23)))
    assert "for 7 of KV, not" in pair.refuses(replace(parcel, nbytes=7))


def test_attack_a_parcel_of_another_message_is_refused(pair: Pair) -> None:
    one, two, three = pair.parcels
    for parcel, other in ((one, two), (one, three), (three, two)):
        assert pair.refuses(replace(parcel, id=other.id)) == "belongs to another message"


def test_attack_what_the_tenant_has_sealed_of_something_else_is_refused(pair: Pair, half: LoadedModel) -> None:
    """Who has the key says more than who has not: also that is looked at."""
    [_, handle, _], seal = pair.made, pair.here._tenant.message_ids.seal
    key, kv = pair.here.kv.key(handle), pair.here.kv.read(handle)
    says = {
        "has KV of another shape or dtype": [
            (key, HostKV(kv.keys.view(torch.int32), kv.values.view(torch.int32))),
            (key, HostKV(kv.keys.transpose(1, 2).contiguous(), kv.values.transpose(1, 2).contiguous())),
        ],
        "belongs to another message": [
            (replace(key, model=half.adapter.fingerprint), kv),
            (replace(key, tokens=(*key.tokens[:-1], 5)), kv),
            (replace(key, parents=((key.parents[0][0], -8),)), kv),
            (replace(key, parents=()), kv),
        ],
        "was encoded at position 13, not 12": [(replace(key, native_offset=13), kv)],
    }
    for why, others in says.items():
        for named, held in others:
            assert pair.refuses(parcel_of(named, held, seal)) == why
    for other in (b"key", pair.here.tenant("other")._tenant.message_ids.seal):
        assert pair.refuses(parcel_of(key, kv, other)) == CHANGED
    for smaller in (
        HostKV(kv.keys.bfloat16(), kv.values.bfloat16()),
        HostKV(kv.keys[:2], kv.values[:2]),
    ):
        assert "of KV, not" in pair.refuses(parcel_of(key, smaller, seal))
    wide = replace(parcel_of(key, HostKV(kv.keys.double(), kv.values.double()), seal), nbytes=6 * TOKEN)
    assert pair.refuses(wide) == "has KV of another shape or dtype"
    assert import_kv(pair.there._tenant, [parcel_of(key, kv, seal)]) == {}, "and nothing else is wrong with it"


def test_attack_an_engine_of_another_salt_model_or_dtype_takes_nothing(
    make_engine: MakeEngine, pair: Pair, half: LoadedModel, tmp_path: Path
) -> None:
    twin = load_model(save_tiny_llama(tmp_path, seed=5))
    for there in (make_engine(salt="other"), make_engine(twin, salt="s"), make_engine(half, salt="s")):
        refused = there.lineage.import_messages(
            [each.id for each in pair.made], ReadLog(rows_of(pair.here, pair.made)), Scope(None)
        )
        assert set(refused) == {each.id for each in pair.made}
        assert set(import_kv(there._tenant, pair.parcels)) == set(refused) and there.stats().kv_bytes == 0


def test_a_parcel_that_is_refused_is_in_no_others_way(pair: Pair) -> None:
    one, two, three = pair.parcels
    refused = import_kv(pair.there._tenant, [one, replace(two, data=b""), three])
    assert list(refused) == [two.id] and pair.there.kv.tiers(pair.made) == ["device", "lineage", "device"]
