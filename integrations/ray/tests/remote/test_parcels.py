"""KV that leaves one engine comes into another bit by bit, is read there as if it had been computed there, and is
believed only as it left."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_support.parcels import (
    TOKEN,
    arrived,
    heard,
    holding,
    known_by,
    require_nothing_wanted,
    require_same_bits,
    rows_of,
    same,
    sent,
    words,
)
from support.adapters import save_adapter, save_mapper

from choreo_agents import Engine, MessageHandle, Sampling
from choreo_agents.engine.kv_packets import export_kv, import_kv
from choreo_agents.engine.lineage import ReadLog
from choreo_agents.engine.messages.message import Scope
from choreo_agents.kv.store.format import opened, parsed
from choreo_agents.models import LoadedModel, load_model

Logits = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module")
def half(tiny_path: Path) -> LoadedModel:
    return load_model(tiny_path, dtype=torch.bfloat16)


@pytest.fixture(params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, tiny: LoadedModel, half: LoadedModel) -> LoadedModel:
    return tiny if request.param == "fp32" else half


def team(engine: Engine) -> list[MessageHandle]:
    """A message, what two have said of it at odd places, and one that has seen all of it out of order."""
    root = engine.prefill(words(1, 30), position=5)
    said = [
        engine.decode(words(2 + number, 3), [root], [40], 90 + number, sampling=Sampling(max_tokens=9, seed=number))
        for number in range(2)
    ]
    return [root, *said, engine.prefill(words(9, 20), [said[1], root, said[0]], [50, 3, 200], 260)]


TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "device": lambda _: {},
    "host": lambda _: {"host_bytes": 1 << 30},
    "disk": lambda folder: {"disk": folder},
    "kept": lambda folder: {"persist_dir": folder},
}


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_sent_is_read_as_if_it_had_been_computed_here(
    make_engine: MakeEngine, tmp_path: Path, logits_by_seed: Logits, model: LoadedModel, tier: str
) -> None:
    here, there = make_engine(model, salt="s", **TIERS[tier](tmp_path)), make_engine(model, salt="s")
    made = team(here)
    said = heard(here, made, 70)
    bits = [here.kv.read(handle) for handle in made]
    if tier == "kept":
        here.kv.persist(made)
        here.kv.flush()
    if tier != "device":
        here.kv.offload()
        assert set(here.kv.tiers(made)) <= {tier, "host", "disk"}
    before, keys = here.stats(), [here.kv.key(handle) for handle in made]
    scope = known_by(there, here, made)
    assert there.kv.tiers(made) == ["lineage"] * 4
    assert sent(here, there, made) == {}
    assert there.kv.tiers(made) == ["device"] * 4
    assert [there.kv.key(handle) for handle in made] == keys and rows_of(there, made) == rows_of(here, made)
    assert heard(there, made, 71) == said, "the same words of the same parents have the same name"
    require_same_bits(logits_by_seed[70], logits_by_seed[71])
    stats = there.stats()
    assert stats.tokens_encoded == said.length and (stats.recomputed, stats.lost, stats.tokens_recomputed) == (0, 0, 0)
    assert all(same(there.kv.read(handle), kv) for handle, kv in zip(made, bits, strict=True))
    total = sum(kv.nbytes for kv in bits)
    assert (arrived(here), arrived(there)) == ((total, 0), (0, total))
    after = here.stats()
    assert (after.tokens_encoded, after.recomputed, after.lost) == (before.tokens_encoded, 0, before.lost)
    there.release(said)
    assert there.stats().kv_bytes == there._core.pool.used_bytes > 0, "it is the tenant's"
    require_nothing_wanted(here), require_nothing_wanted(there)
    there._core.close_scope(scope)
    assert (there.stats().messages, there.stats().kv_bytes) == (0, 0)


def test_what_is_lost_after_it_came_is_computed_again_as_ever(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = team(here)
    heard(here, made, 70)
    known_by(there, here, made)
    sent(here, there, made)
    there.kv.offload(made[1:3])
    heard(there, made, 71)
    assert (there.stats().recomputed, there.stats().tokens_recomputed) == (2, made[1].length + made[2].length)
    difference = torch.stack(logits_by_seed[70]) - torch.stack(logits_by_seed[71])
    assert difference.abs().max() <= 1e-4


def test_what_came_goes_on_to_a_third(make_engine: MakeEngine) -> None:
    engines = [make_engine(salt="s") for _ in range(3)]
    made = team(engines[0])
    for here, there in itertools.pairwise(engines):
        known_by(there, here, made)
        assert sent(here, there, made) == {}
    assert all(same(engines[0].kv.read(handle), engines[2].kv.read(handle)) for handle in made)
    assert engines[2].stats().tokens_encoded == 0


Drawn = tuple[bool, int, list[tuple[int, int]], int]
"""Whether it is decoded; its tokens; its parents, by number modulo what there is, and their places; its own."""


@st.composite
def graphs(draw: st.DrawFn) -> list[Drawn]:
    parents = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=4, unique_by=lambda each: each[0])
    each = st.tuples(st.booleans(), st.integers(1, 40), parents, st.integers(0, 400))
    return draw(st.lists(each, min_size=1, max_size=7))


def grown(engine: Engine, graph: list[Drawn]) -> list[MessageHandle]:
    made: list[MessageHandle] = []
    for number, (decoded, count, seen, at) in enumerate(graph):
        placed = {made[each % len(made)]: offset for each, offset in seen} if made else {}
        view = list(placed), list(placed.values()), at
        if decoded:
            made.append(engine.decode(words(number, 2), *view, sampling=Sampling(max_tokens=count, seed=number)))
        else:
            made.append(engine.prefill(words(number, count), *view))
    return made


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs(), chosen=st.sets(st.integers(0, 6)), order=st.randoms(use_true_random=False))
def test_whatever_is_sent_of_a_graph_is_there_and_the_rest_is_computed(
    make_engine: MakeEngine, graph: list[Drawn], chosen: set[int], order: random.Random
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = grown(here, graph)
    going = [handle for number, handle in enumerate(dict.fromkeys(made)) if number in chosen]
    order.shuffle(going)
    known_by(there, here, made)
    assert sent(here, there, going) == {}
    tiers = {handle: "device" if handle in going else "lineage" for handle in made}
    assert there.kv.tiers(list(tiers)) == list(tiers.values())
    assert rows_of(there, made) == rows_of(here, made)
    assert all(same(there.kv.read(handle), here.kv.read(handle)) for handle in going)
    stats = there.stats()
    assert (stats.tokens_encoded, stats.recomputed) == (0, 0)
    for handle in tiers:
        difference = there.kv.read(handle).keys - here.kv.read(handle).keys
        assert difference.abs().max() <= 1e-4
    assert there.stats().recomputed == len(tiers) - len(going)
    for engine in (here, there):
        engine.check()
        engine.close()


def test_only_what_has_kv_is_packed_and_nothing_is_computed_for_it(make_engine: MakeEngine) -> None:
    here, other = make_engine(salt="s"), make_engine(salt="s", method="naive")
    there, lazy, parked = here.prefill(words(1)), here.prefill(words(2), lazy=True), here.prefill(words(3))
    stranger = here.tenant("other").prefill(words(1))
    here.kv.offload([parked])
    ids = [each.id for each in (parked, there, lazy, stranger, there)] + ["0" * 32]
    [parcel] = export_kv(here._tenant, ids)
    assert (parcel.id, parcel.nbytes) == (there.id, 24 * TOKEN) and same(holding(here, parcel), here.kv.read(there))
    assert here.stats().tokens_encoded == 48 and here.kv.tiers([parked, lazy]) == ["lineage", "lineage"]
    assert arrived(here) == (24 * TOKEN, 0) and arrived(here.tenant("third")) == (0, 0)
    assert export_kv(other._tenant, [other.prefill(words(1)).id]) == []


def test_what_nobody_leases_is_packed_if_a_file_has_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It is remembered by what comes of it."""
    here = make_engine(salt="s", persist_dir=tmp_path)
    root = here.prefill(words(1))
    bits = here.kv.read(root)
    child = here.prefill(words(2), [root])
    here.kv.persist([root])
    here.kv.flush()
    here.release(root)
    message = here._tenant.find(child).parents[0]
    assert message.entry is None
    [parcel] = export_kv(here._tenant, [root.id])
    key, seal = message.kv_key(), here._tenant.message_ids.seal
    found, at = opened(parsed(parcel.data), key.written(), key.length, here._core.pool.geometry, seal)
    assert same(found, bits) and at == 0 and message.entry is None
    here.kv.unpersist([root])
    assert export_kv(here._tenant, [root.id]) == [] and here.stats().recomputed == 0


def test_a_file_that_is_bad_is_left_out(make_engine: MakeEngine, tmp_path: Path) -> None:
    here = make_engine(salt="s", persist_dir=tmp_path)
    good, bad = here.prefill(words(1)), here.prefill(words(2))
    here.kv.persist([good, bad])
    here.kv.flush()
    here.kv.offload()
    [path] = tmp_path.rglob(f"{bad.id}*")
    path.write_bytes(path.read_bytes()[:-1])
    assert [parcel.id for parcel in export_kv(here._tenant, [bad.id, good.id])] == [good.id]
    assert here.stats().recomputed == 0 and here.stats().tokens_encoded == 48
    here.check()


def test_what_has_its_kv_keeps_it_and_is_not_refused(make_engine: MakeEngine) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s", host_bytes=1 << 20)
    made = [here.prefill(words(number)) for number in range(3)]
    known_by(there, here, made)
    there.kv.prefetch(made[:2])
    there.kv.offload([made[1]])
    segment = there._core.table.entry(there._tenant.find(made[0])).segment
    parcels = export_kv(here._tenant, [each.id for each in made])
    assert import_kv(there._tenant, [replace(parcels[0], data=b""), *parcels, *parcels]) == {}
    assert there.kv.tiers(made) == ["device", "host", "device"] and arrived(there) == (0, 24 * TOKEN)
    assert there._core.table.entry(there._tenant.find(made[0])).segment is segment
    assert there.stats().recomputed == 2, "all before"
    require_nothing_wanted(there)


def test_what_nobody_knows_leases_or_keeps_kv_for_is_refused(make_engine: MakeEngine) -> None:
    here, there, text = (make_engine(salt="s", **options) for options in ({}, {}, {"method": "baseline"}))
    made = team(here)
    child, parcels = made[-1], export_kv(here._tenant, [each.id for each in made])
    assert set(import_kv(there._tenant, parcels).values()) == {"it is unknown here: send its parents first"}
    scope = known_by(there, here, [child])
    refused = import_kv(there._tenant, parcels)
    assert refused == {each.id: "no call here leases it, or waits for it" for each in made[:-1]}
    assert there.kv.tiers(made) == [None, None, None, "device"], "what it comes of is remembered by it alone"
    stranger = there.tenant("other")
    assert set(import_kv(stranger._tenant, parcels)) == {each.id for each in made}
    known_by(text, here, made)
    assert set(import_kv(text._tenant, parcels).values()) == {"an engine with method 'baseline' has no KV"}
    there._core.close_scope(scope)
    assert set(import_kv(there._tenant, parcels)) == {each.id for each in made}
    assert (there.stats().kv_bytes, there.stats().host_bytes, text.stats().kv_bytes) == (0, 0, 0)
    assert arrived(there) == (0, child.length * TOKEN)


def test_a_message_that_was_promised_is_encoded_by_nobody_once_it_came(make_engine: MakeEngine) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    made = here.prefill(words(1))
    assert there.prefill(words(1), lazy=True) == made
    assert sent(here, there, [made]) == {}
    said = heard(there, [made], 71)
    assert there.prefill(words(1)) == made and there.stats().tokens_encoded == said.length


@pytest.mark.parametrize("maker", ["mapper", "adapter"])
def test_what_adapters_and_mappers_have_made_arrives_as_it_left(
    make_engine: MakeEngine, tiny: LoadedModel, tiny_path: Path, tmp_path: Path, maker: str, logits_by_seed: Logits
) -> None:
    adapter = save_mapper(save_adapter(tmp_path / "both", tiny_path), tiny)
    here, there = (make_engine(salt="s", adapter=adapter, host_bytes=1 << 20) for _ in range(2))
    source = here.prefill(words(1))
    [copy] = here.branches.map([source])
    going = source if maker == "adapter" else copy
    bits = here.kv.read(going)
    heard(here, [going], 70)
    known_by(there, here, [going])
    for turn, tier in enumerate(("device", "host")):
        if turn:
            here.kv.offload([going])
            there.kv.offload([going])
            with there._core.lock:
                entry = there._core.table.entry(there._tenant.find(going))
                there._core.cache._host.take(entry)
        parcels = export_kv(here._tenant, [going.id])
        assert [parcel.nbytes for parcel in parcels] == [24 * TOKEN], tier
        assert import_kv(there._tenant, parcels) == {} and same(there.kv.read(going), bits)
    heard(there, [going], 71)
    require_same_bits(logits_by_seed[70], logits_by_seed[71])
    assert (there.stats().tokens_mapped, there.stats().recomputed) == (0, 0)
    assert there.inspect.ancestors(going) == here.inspect.ancestors(going)


def test_a_copy_made_by_what_is_not_loaded_is_not_known(
    make_engine: MakeEngine, tiny: LoadedModel, tmp_path: Path
) -> None:
    adapter = save_mapper(tmp_path / "mapper", tiny)
    here = make_engine(salt="s", adapter=adapter)
    [copy] = here.branches.map([here.prefill(words(1))])
    there = make_engine(salt="s")
    there.lineage.import_messages([copy.id], ReadLog(rows_of(here, [copy])), Scope(None))
    assert set(sent(here, there, [copy])) == {copy.id}
