"""KV that leaves the engine and comes back, in this process or another, is the same and is never trusted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MakeEngine
from safetensors.torch import load_file, save_file
from support.tiny import save_tiny_llama

from choreo_agents import Engine, MessageHandle, Prefill, Sampling
from choreo_agents.errors import CapacityError, HandleError, InvalidRequestError
from choreo_agents.kv.store import KVKey, KVStore
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models import load_model

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 360) for _ in range(count)]


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def pair(engine: Engine) -> tuple[list[Prefill], list[MessageHandle]]:
    """A message, and another that has seen it across a gap."""
    root = Prefill(tokens(1, 30), position=5)
    first = engine.prefill([root])[0]
    child = Prefill(tokens(2, 20), [first], [5], 50)
    return [root, child], [first, engine.prefill([child])[0]]


def probe(engine: Engine, view: list[MessageHandle], seed: int) -> None:
    engine.decode([7], view, [40, 0], 90, sampling=Sampling(forced_token_ids=(5, 6, 7, 8), seed=seed))


def test_what_is_adopted_is_the_message_itself(
    make_engine: MakeEngine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    calls, made = pair(here)
    adopted: list[MessageHandle] = []
    for call, handle in zip(calls, made, strict=True):
        assert there.kv.key(call).handle == handle and there.kv.tiers([handle]) == [None]
        adopted.append(there.kv.import_kv(call, here.kv.read(handle)))
        assert there.kv.tiers([handle]) == ["device"] and same(there.kv.read(handle), here.kv.read(handle))
    assert adopted == made
    assert there.stats().tokens_encoded == 0 and there.stats().adopted == 2
    probe(here, made, 1)
    probe(there, adopted, 2)
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))
    again = there.prefill(calls)
    assert again == made and there.stats().leases == 5, "a prefill finds what was adopted"
    assert there.inspect.ancestors(made[1]) == {made[0]: None}


def test_what_is_adopted_is_computed_again_from_its_lineage(
    make_engine: MakeEngine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s", kv_budget_bytes=256 * TOKEN)
    calls, made = pair(here)
    for call, handle in zip(calls, made, strict=True):
        there.kv.import_kv(call, here.kv.read(handle))
    there.kv.offload(made)
    assert there.kv.tiers(made) == ["lineage", "lineage"] and there.stats().kv_bytes == 0
    assert same(there.kv.read(made[0]), here.kv.read(made[0]))
    difference = there.kv.read(made[1]).keys - here.kv.read(made[1]).keys
    assert difference.abs().max() <= 1e-4
    assert there.stats().recomputed == 2
    probe(here, made, 3)
    probe(there, made, 4)
    assert (torch.stack(logits_by_seed[3]) - torch.stack(logits_by_seed[4])).abs().max() <= 1e-4


def test_adopting_what_was_lost_brings_it_back_without_computing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    calls, made = pair(engine)
    host_kv = engine.kv.read(made[0])
    engine.kv.offload(made)
    encoded = engine.stats().tokens_encoded
    assert engine.kv.import_kv(calls[0], host_kv) == made[0]
    assert engine.kv.tiers(made) == ["device", "lineage"] and engine.stats().tokens_encoded == encoded
    assert same(engine.kv.read(made[0]), host_kv)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_is_read_in_every_tier(make_engine: MakeEngine, tmp_path: Path, tier: str) -> None:
    engine = make_engine(**({"host_bytes": 1 << 20} if tier == "host" else {"disk": tmp_path}))
    _, made = pair(engine)
    host_kvs = [engine.kv.read(handle) for handle in made]
    encoded = engine.stats().tokens_encoded
    for _ in range(2):
        engine.kv.offload(made)
        assert set(engine.kv.tiers(made)) <= {tier, "host"}
        assert all(same(engine.kv.read(h), host_kv) for h, host_kv in zip(made, host_kvs, strict=True))
    engine.kv.offload(made)
    engine.kv.prefetch(made)
    assert engine.kv.tiers(made) == ["device", "device"]
    assert engine.stats().tokens_encoded == encoded


def test_kv_from_another_position_serves(
    make_engine: MakeEngine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    calls, made = pair(here)
    for call, handle in zip(calls, made, strict=True):
        moved = replace(call, offsets=[105] if call.parents else None, position=(call.position or 0) + 100)
        assert there.kv.import_kv(moved, here.kv.read(handle), call.position) == handle
    probe(here, made, 5)
    probe(there, made, 6)
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[5], logits_by_seed[6], strict=True))


def test_a_parcel_that_does_not_fit_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=64 * TOKEN)
    handle = engine.prefill(tokens(1, 30))
    host_kv = engine.kv.read(handle)
    call = Prefill(tokens(3, 30))
    wrong = [
        HostKV(host_kv.keys[:, :, :-1], host_kv.values[:, :, :-1]),
        HostKV(host_kv.keys.double(), host_kv.values.double()),
        HostKV(host_kv.keys[:2], host_kv.values[:2]),
        None,
    ]
    for each in wrong:
        with pytest.raises(InvalidRequestError, match="not fit 30 tokens"):
            engine.kv.import_kv(call, each)  # type: ignore[arg-type]
    for place in (-1, True, 2000, "0"):
        with pytest.raises(InvalidRequestError):
            engine.kv.import_kv(call, host_kv, place)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="before position 0"):
        engine.kv.import_kv(Prefill(tokens(3, 30), [handle]), host_kv, 29)
    engine.kv.pin(handle)
    long = Prefill(tokens(4, 40))
    with pytest.raises(CapacityError, match="unpin"):
        engine.kv.import_kv(long, HostKV(*(torch.zeros(3, 2, 40, 16) for _ in range(2))))
    assert engine.stats().messages == 1
    with pytest.raises(HandleError):
        engine.kv.read(MessageHandle(id="0" * 32, model=handle.model, length=3))
    text = make_engine(method="naive")
    with pytest.raises(InvalidRequestError, match="has no KV to read"):
        text.kv.read(text.prefill(tokens(1, 5)))
    assert text.kv.import_kv(call, host_kv) == text.prefill([call])[0], "a twin that re-encodes text keeps the text"


def test_leases_outside_of_scopes_outlive_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.scope():
        with engine.scope():
            kept = engine.prefill(tokens(1, 10))
            engine.kv.lease([kept], scoped=False)
            inner = engine.prefill(tokens(2, 10))
        assert engine.kv.tiers([kept, inner]) == ["device", None]
        engine.kv.lease([kept])
        gone = engine.prefill(tokens(3, 10))
        assert engine.stats().leases == 3
    assert engine.kv.tiers([kept, gone]) == ["device", None] and engine.stats().leases == 1


def test_leases_are_dropped_once_and_never_those_of_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    kept = engine.prefill(tokens(1, 10))
    with engine.scope():
        inside = engine.kv.lease([kept, kept])
    inside.release()
    assert engine.stats().leases == 1, "they ended with their scope"
    with engine.scope():
        inside = engine.kv.lease([kept])
        with engine.scope():
            inside.release()
            assert engine.stats().leases == 1
        outside = engine.kv.lease([kept])
        outside.handles.append(engine.prefill(tokens(2, 10)))
        outside.release()
        outside.release()
        assert engine.stats().leases == 1
    assert engine.kv.tiers([kept]) == ["device"]
    with pytest.raises(HandleError):
        engine.kv.lease([kept, MessageHandle(id="0" * 32, model=kept.model, length=3)])
    assert engine.stats().leases == 1


def test_another_tenant_neither_holds_nor_reads_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    other = engine.tenant("other")
    _, made = pair(engine)
    assert other.kv.tiers([made[0]]) == [None]
    for ask in (
        other.kv.read,
        lambda h: other.kv.lease([h]),
        other.kv.key,
        lambda h: other.kv.offload([h]),
    ):
        with pytest.raises(HandleError):
            ask(made[0])
    assert other.kv.key(Prefill(tokens(1, 30))).handle != made[0]


# --- files ---


def wanted(engine: Engine, call: Prefill) -> KVKey:
    """What the files of `pair` are asked for: found by content alone, before the engine has any of it."""
    root = engine.kv.key(Prefill(tokens(1, 30), position=5))
    if not call.parents:
        return root
    return engine.kv.key(Prefill(call.content, [root.handle], [5], 50))


def saved(engine: Engine, folder: Path) -> tuple[KVStore, list[Prefill], list[MessageHandle]]:
    store = engine.kv.store(folder)
    calls, made = pair(engine)
    for handle in made:
        assert store.save(engine.kv.key(handle), engine.kv.read(handle)) and store.has(handle.id)
    return store, calls, made


def test_a_file_holds_the_same_bits_for_another_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    here, there = make_engine(salt="s"), make_engine(salt="s")
    _, calls, made = saved(here, tmp_path)
    store = there.kv.store(tmp_path)
    for call, handle in zip(calls, made, strict=True):
        found = store.load(wanted(there, call))
        assert found is not None
        there.kv.import_kv(call, *found)
        assert same(there.kv.read(handle), here.kv.read(handle))
    assert there.stats().tokens_encoded == 0
    assert [path.suffix for path in store.folder.iterdir()] == [".safetensors"] * 2


def _rewritten(change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> Callable[[Path, Path], None]:
    def rewrite(path: Path, _: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata())
        tensors = load_file(path)
        change(tensors, about)
        save_file(tensors, path, metadata=about)

    return rewrite


def _flip(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "truncated": lambda path, _: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path, _: path.write_bytes(b""),
    "one bit": _flip,
    "no safetensors": lambda path, _: path.write_bytes(b"{}" * 4000),
    "another message's": lambda path, other: path.write_bytes(other.read_bytes()),
    "another position": _rewritten(lambda _, about: about.update(native_offset="6")),
    "no position": _rewritten(lambda _, about: about.update(native_offset="-5")),
    "no seal": _rewritten(lambda _, about: about.pop("seal") and None),
    "other tokens": _rewritten(lambda _, about: about.update(tokens="[1]")),
    "one tensor too few": _rewritten(lambda tensors, _: tensors.pop("values") is None or None),
    "one tensor too many": _rewritten(lambda tensors, _: tensors.update(more=torch.zeros(1))),
    "another type": _rewritten(lambda tensors, _: tensors.update(keys=tensors["keys"].half())),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_or_foreign_file_is_set_aside(make_engine: MakeEngine, tmp_path: Path, damage: str) -> None:
    engine = make_engine(salt="s")
    store, calls, made = saved(engine, tmp_path)
    path, other = (store.folder / f"{handle.id}.safetensors" for handle in made)
    entry = wanted(engine, calls[0])
    assert store.load(entry) is not None
    DAMAGE[damage](path, other)
    assert store.load(entry) is None
    assert not path.exists() and path.with_suffix(".broken").exists()
    assert store.save(engine.kv.key(made[0]), engine.kv.read(made[0])) and store.load(entry) is not None


def test_models_and_tenants_have_folders_of_their_own(
    make_engine: MakeEngine, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = make_engine(salt="s")
    store, calls, made = saved(engine, tmp_path)
    twin = make_engine(load_model(save_tiny_llama(tmp_path_factory.mktemp("other"), seed=5)), salt="s")
    tenant = engine.tenant("other")
    for stranger in (twin, tenant):
        theirs = stranger.kv.store(tmp_path)
        entry = wanted(stranger, calls[0])
        assert theirs.folder != store.folder and theirs.load(entry) is None
        # Even under the right name it is no other's: the seal is the tenant's.
        (theirs.folder / f"{entry.id}.safetensors").write_bytes(
            (store.folder / f"{made[0].id}.safetensors").read_bytes()
        )
        assert theirs.load(entry) is None


def test_the_longest_unused_files_leave_for_new_ones(make_engine: MakeEngine, tmp_path: Path) -> None:
    import os

    engine = make_engine(salt="s")
    made = [engine.prefill(tokens(seed, 40)) for seed in range(4)]
    store = engine.kv.store(tmp_path, budget_bytes=3 * 42 * TOKEN)
    for age, handle in enumerate(made[:3]):
        assert store.save(engine.kv.key(handle), engine.kv.read(handle))
        os.utime(store.folder / f"{handle.id}.safetensors", (age, age))
    assert store.load(engine.kv.key(made[0])) is not None, "used just now"
    store.save(engine.kv.key(made[3]), engine.kv.read(made[3]))
    assert [store.has(handle.id) for handle in made] == [True, False, True, True]
    assert store.look() <= store.budget_bytes
    tight = engine.kv.store(tmp_path / "tight", budget_bytes=39 * TOKEN)
    assert not tight.save(engine.kv.key(made[0]), engine.kv.read(made[0])) and not tight.has(made[0].id)
