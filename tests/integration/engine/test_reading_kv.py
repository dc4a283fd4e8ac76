"""KV that leaves the pool and comes back, in this process or another, is the same and is never trusted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from safetensors.torch import load_file, save_file
from support.tiny import save_tiny_llama

from choreo_agents import Engine, MessageHandle, Prefill
from choreo_agents.errors import HandleError, InvalidRequestError
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models import load_model

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 360) for _ in range(count)]


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def pair(engine: Engine) -> list[MessageHandle]:
    """A message, and another that has seen it across a gap."""
    [root] = engine.prefill([Prefill(tokens(1, 30), position=5)])
    return [root, *engine.prefill([Prefill(tokens(2, 20), [root], [5], 50)])]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_is_read_in_every_tier(make_engine: MakeEngine, tmp_path: Path, tier: str) -> None:
    engine = make_engine(**({"host_bytes": 1 << 20} if tier == "host" else {"disk": tmp_path}))
    made = pair(engine)
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


def test_what_has_no_kv_is_not_read(make_engine: MakeEngine) -> None:
    engine, text = make_engine(), make_engine(method="naive")
    handle = engine.prefill(tokens(1, 30))
    with pytest.raises(HandleError):
        engine.kv.read(MessageHandle(id="0" * 32, model=handle.model, length=3))
    with pytest.raises(InvalidRequestError, match="has no KV to read"):
        text.kv.read(text.prefill(tokens(1, 5)))


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
    made = pair(engine)
    assert other.kv.tiers([made[0]]) == [None]
    for ask in (
        other.kv.read,
        lambda h: other.kv.lease([h]),
        other.kv.key,
        lambda h: other.kv.offload([h]),
    ):
        with pytest.raises(HandleError):
            ask(made[0])
    assert other.kv.key(Prefill(tokens(1, 30))).id != made[0].id


# --- files ---


def saved(make_engine: MakeEngine, folder: Path, **options: Any) -> tuple[Engine, KVStore, list[MessageHandle]]:
    engine = make_engine(**({"salt": "s", "persist_dir": folder} | options))
    made = pair(engine)
    engine.kv.persist(made)
    engine.kv.flush()
    return engine, store_of(engine), made


def store_of(engine: Engine) -> KVStore:
    assert engine._tenant.persistent_kv is not None and engine._tenant.persistent_kv.store is not None
    return engine._tenant.persistent_kv.store


def test_a_file_holds_the_same_bits_for_another_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    here, _, made = saved(make_engine, tmp_path)
    there, store, again = saved(make_engine, tmp_path)
    assert again == made and all(same(there.kv.read(handle), here.kv.read(handle)) for handle in made)
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
    engine, store, made = saved(make_engine, tmp_path)
    path, other = (store.folder / f"{handle.id}.safetensors" for handle in made)
    key = engine.kv.key(made[0])
    assert store.load(key.id, key.length) is not None
    DAMAGE[damage](path, other)
    assert store.load(key.id, key.length) is None
    assert not path.exists() and path.with_suffix(".broken").exists()
    assert store.save(key, engine.kv.read(made[0])) and store.load(key.id, key.length) is not None


def test_models_and_tenants_have_folders_of_their_own(
    make_engine: MakeEngine, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine, store, made = saved(make_engine, tmp_path)
    twin = make_engine(
        load_model(save_tiny_llama(tmp_path_factory.mktemp("other"), seed=5)), salt="s", persist_dir=tmp_path
    )
    for stranger in (twin, engine.tenant("other")):
        theirs = store_of(stranger)
        key = stranger.kv.key(Prefill(tokens(1, 30), position=5))
        assert theirs.folder != store.folder and theirs.load(key.id, key.length) is None
        # Even under the right name it is no other's: the seal is the tenant's.
        (theirs.folder / f"{key.id}.safetensors").write_bytes((store.folder / f"{made[0].id}.safetensors").read_bytes())
        assert theirs.load(key.id, key.length) is None


def test_the_longest_unused_files_leave_for_new_ones(make_engine: MakeEngine, tmp_path: Path) -> None:
    import os

    engine = make_engine(salt="s", persist_dir=tmp_path, persist_bytes=3 * 42 * TOKEN)
    made = [engine.prefill(tokens(seed, 40)) for seed in range(4)]
    store = store_of(engine)
    for age, handle in enumerate(made[:3]):
        assert store.save(engine.kv.key(handle), engine.kv.read(handle))
        os.utime(store.folder / f"{handle.id}.safetensors", (age, age))
    assert store.load(made[0].id, 40) is not None, "used just now"
    store.save(engine.kv.key(made[3]), engine.kv.read(made[3]))
    assert [store.has(handle.id) for handle in made] == [True, False, True, True]
    assert store.look() <= store.budget_bytes
    tight = store_of(make_engine(salt="s", persist_dir=tmp_path / "tight", persist_bytes=39 * TOKEN))
    assert not tight.save(engine.kv.key(made[0]), engine.kv.read(made[0])) and not tight.has(made[0].id)
