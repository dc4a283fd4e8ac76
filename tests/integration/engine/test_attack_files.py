"""Files of KV that somebody else has written, or put something else in their place: none is believed or waited for."""

from __future__ import annotations

import os
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeEngine
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from choreo_agents import Engine, MessageHandle, Prefill, Sampling
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.store import store as store_module
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import EventList, FileSkipped

TEXT = list(range(20, 50))
TEXT_BYTES = len(TEXT) * 2 * 3 * 2 * 16 * 4
"""Bytes of its keys and values in the tiny model."""
Harm = Callable[[Path], None]


def bytes_of_ones(path: Path) -> None:
    """A forgery as whole as the old checksum asked for: ones, under the metadata of the file that was there."""
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata())
    tensors = {name: torch.ones_like(tensor) for name, tensor in load_file(path).items()}
    code = 0
    for tensor in tensors.values():
        code = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, code)
    save_file(tensors, path, metadata=about | {"checksum": f"{code:08x}"})


def sealed_otherwise(path: Path) -> None:
    """All as it was, under a seal of letters that no seal has."""
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata())
    save_file(load_file(path), path, metadata=about | {"seal": "\u00e9" * 32})


def replaced_by(make: Callable[[Path], object]) -> Harm:
    def harm(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return harm


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


HARMS: dict[str, Harm] = {
    "one flipped bit": one_bit,
    "forged, with a checksum that is right": bytes_of_ones,
    "a seal that is no ASCII": sealed_otherwise,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "no safetensors": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "a header as long as the file": lambda path: path.write_bytes(
        (path.stat().st_size - 8).to_bytes(8, "little") + b"[" * (path.stat().st_size - 8)
    ),
    "oversized": lambda path: os.truncate(path, 1 << 40),
    "a pipe": replaced_by(os.mkfifo),
    "a link to what was there": replaced_by(lambda path: path.symlink_to(path.with_name("elsewhere"))),
    "another name of what was there": replaced_by(lambda path: path.hardlink_to(path.with_name("elsewhere"))),
    "a link to a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "a folder": replaced_by(Path.mkdir),
    "gone": Path.unlink,
}


SPILL_HARMS = {name: HARMS[name] for name in ("one flipped bit", "truncated", "empty", "no safetensors")} | {
    "ones": lambda path: path.write_bytes(b"\x01" * path.stat().st_size),
    "another message": lambda path: path.write_bytes(path.read_bytes()[:TEXT_BYTES] * 2),
}


def parked(engine: Engine, position: int = 0) -> tuple[MessageHandle, Path]:
    """A message on disk, and the only way to its file: as this process has it open."""
    other, handle = engine.prefill(TEXT[::-1]), engine.prefill(TEXT, position=position)
    engine.kv.offload()
    until(lambda: engine.kv.tiers([handle, other]) == ["disk", "disk"])
    assert engine._core._disk.spill is not None
    return handle, Path(f"/proc/self/fd/{engine._core._disk.spill.file.fileno()}")


def store_of(engine: Engine) -> KVStore:
    """The store of what outlives the engine."""
    assert engine._tenant.persistent_kv is not None and engine._tenant.persistent_kv.store is not None
    return engine._tenant.persistent_kv.store


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize("harm", SPILL_HARMS)
def test_attack_a_file_of_the_disk_tier_that_was_changed_is_computed_again(
    make_engine: MakeEngine, tmp_path: Path, harm: str, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    events = EventList()
    engine, plain = make_engine(disk=tmp_path, sink=events), make_engine()
    handle, path = parked(engine)
    SPILL_HARMS[harm](path)
    engine.decode([7], [handle], sampling=Sampling(forced_token_ids=(5, 6), seed=1), timeout_s=20)
    plain.decode([7], [plain.prefill(TEXT)], sampling=Sampling(forced_token_ids=(5, 6), seed=2))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))
    assert (engine.stats().recomputed, engine.stats().restored_from_disk) == (1, 0)
    [skipped] = [event for event in events.events if isinstance(event, FileSkipped)]
    assert skipped.path == str(tmp_path) and skipped.reason


def test_attack_no_other_engines_file_is_believed(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Not even of the same tenant and words, under the same id: it was encoded elsewhere."""
    one, other = (make_engine(disk=tmp_path, salt="s") for _ in range(2))
    (mine, path), (same, theirs) = parked(one), parked(other, 100)
    assert mine == same and path != theirs
    path.write_bytes(theirs.read_bytes())
    one.decode([7], [mine], sampling=Sampling(forced_token_ids=(5,)))
    assert (one.stats().recomputed, one.stats().restored_from_disk) == (1, 0)


def test_attack_what_leaves_the_host_has_no_name_and_ends_with_its_process(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """So nobody can open, replace or link it, and a killed engine leaves nothing to be found."""
    engine = make_engine(disk=tmp_path / "disk")
    handle, path = parked(engine)
    about = path.stat()
    assert [*tmp_path.rglob("*")] == [tmp_path / "disk"] and about.st_nlink == 0 and about.st_size >= 2 * TEXT_BYTES
    engine.decode([7], [handle], sampling=Sampling(forced_token_ids=(5,)))
    assert engine.stats().restored_from_disk == 1
    engine.close()
    assert not path.exists() or path.stat().st_ino != about.st_ino


def test_attack_only_its_user_can_look_into_the_folders(make_engine: MakeEngine, tmp_path: Path) -> None:
    old = os.umask(0o002)
    try:
        disk, module_cache, open_one = tmp_path / "disk", tmp_path / "shelf", tmp_path / "open"
        models = open_one / make_engine().model.adapter.fingerprint
        models.mkdir(parents=True)
        tenants = store_of(make_engine(persist_dir=open_one, salt="s")).folder
        tenants.chmod(0o775)
        models.chmod(0o775)
        assert store_of(make_engine(persist_dir=open_one, salt="s")).folder == tenants
        engine = make_engine(disk=disk, persist_dir=module_cache, salt="s")
        handle, path = parked(engine)
        store = store_of(engine)
        assert store.save(engine.kv.key(handle), engine.kv.read(handle))
    finally:
        os.umask(old)
    made = [disk, module_cache, store.folder.parent, store.folder, models, tenants]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 6
    files = [path, *store.folder.iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2


@pytest.mark.parametrize("harm", ["another user's", "a link", "a place where everybody renames"])
def test_attack_a_folder_that_others_could_exchange_is_refused(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    engine = make_engine(salt="s")
    place = tmp_path / "place"
    if harm == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.mkdir()
        (place / engine.model.adapter.fingerprint).symlink_to(tmp_path / "elsewhere")
    elif harm == "another user's":
        (place / engine.model.adapter.fingerprint).mkdir(parents=True)
        monkeypatch.setattr(store_module, "_ours", lambda about: False)
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="use a folder of your own"):
        make_engine(persist_dir=place, salt="s")


def test_attack_what_outlives_an_engine_without_a_salt_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path)
    with pytest.raises(InvalidRequestError, match="salt="):
        engine.kv.persist([engine.prefill(TEXT)])
    assert not list(tmp_path.iterdir())
    assert store_of(engine.tenant("a secret")).folder.exists()


@pytest.mark.parametrize("harm", [name for name in HARMS if name != "gone"])
def test_attack_a_file_that_outlives_its_engine_and_was_changed_is_set_aside(
    make_engine: MakeEngine, tmp_path: Path, harm: str
) -> None:
    events = EventList()
    engine = make_engine(salt="s", persist_dir=tmp_path, sink=events)
    store, handle = store_of(engine), engine.prefill(TEXT)
    key, kv = engine.kv.key(handle), engine.kv.read(handle)
    assert store.save(key, kv) and store.load(key.id, key.length) is not None
    HARMS[harm](store.folder / f"{handle.id}.safetensors")
    engine.kv.offload()
    engine.decode([7], [handle], sampling=Sampling(forced_token_ids=(5, 6)), timeout_s=20)
    assert (engine.stats().recomputed, engine.stats().restored_from_disk) == (1, 0)
    [skipped] = [event for event in events.events if isinstance(event, FileSkipped)]
    assert skipped.path.endswith(f"{handle.id}.safetensors") and skipped.reason
    assert store.save(key, kv) and store.load(key.id, key.length) is not None


@pytest.mark.parametrize("harm", ["a pipe", "a link to a device", "a folder"])
def test_attack_what_stands_in_a_files_place_is_not_taken_for_one(
    make_engine: MakeEngine, tmp_path: Path, harm: str
) -> None:
    engine = make_engine(salt="s", persist_dir=tmp_path)
    store, handle = store_of(engine), engine.prefill(TEXT)
    path = store.folder / f"{handle.id}.safetensors"
    path.touch()
    HARMS[harm](path)
    assert not store.has(handle.id)
    assert store.look() < 100


def test_attack_a_file_sealed_by_one_tenant_is_not_believed_by_another(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It says of itself all that the other asks for, and lies where the other looks: but it bears the wrong seal."""
    engine = make_engine(salt="mine", persist_dir=tmp_path)
    other = engine.tenant("other's")
    theirs = store_of(other)
    key = other.kv.key(Prefill(TEXT))
    kv = engine.kv.read(engine.prefill(TEXT))
    place, geometry = theirs.folder.relative_to(tmp_path).parts, engine.model.adapter.geometry
    forged = HostKV(torch.ones_like(kv.keys), torch.ones_like(kv.values))
    assert KVStore(tmp_path, place, geometry, engine._tenant.message_ids.seal, 1 << 30).save(key, forged)
    assert theirs.load(key.id, key.length) is None
    assert theirs.save(key, kv) and theirs.load(key.id, key.length) is not None, "its own it believes"


def test_attack_an_engines_store_reads_nothing_that_it_has_not_written(tmp_path: Path) -> None:
    """Another message's bytes in the place of one, and those of the other file."""
    why: list[str] = []
    geometry = KVGeometry(1, 1, 8, torch.float32)
    one, other = (SpillFile(tmp_path, geometry, 1 << 20, lambda _, w: why.append(w)) for _ in range(2))
    kv = HostKV(torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
    runs = one.space.allocate(4), one.space.allocate(4)
    assert runs[0] is not None and runs[1] is not None
    digests = one.write(runs[0], kv), one.write(runs[1], HostKV(kv.values, kv.keys))
    other.write(runs[0], HostKV(kv.values, kv.keys))
    found = one.read(runs[0], digests[0], 7)
    assert found is not None and torch.equal(found[0].keys, kv.keys) and found[1] == 7
    assert torch.equal(found[0].values, kv.values)
    assert one.read(runs[1], digests[0], 7) is None and other.read(runs[0], digests[0], 7) is None
    assert why == ["was changed"] * 2
    one.file.close(), other.file.close()
    assert not [*tmp_path.iterdir()]
