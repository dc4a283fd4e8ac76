"""Files of KV that somebody else has written, or put something else in their place: none is believed or waited for."""

from __future__ import annotations

import os
import shutil
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
from choreo_agents.kv.store import files as files_module
from choreo_agents.kv.store.files import EngineDirectory, PersistentDirectory
from choreo_agents.kv.store.key import TierKey
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import EventList, FileSkipped

TEXT = list(range(20, 50))
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


def parked(engine: Engine) -> tuple[MessageHandle, Path]:
    """A message on disk, and its file."""
    handle = engine.prefill(TEXT)
    engine.kv.offload()
    until(lambda: engine.kv.tiers([handle]) == ["disk"])
    assert engine._core._disk is not None and engine._core._disk.store is not None
    [path] = engine._core._disk.store.folder.glob(f"{handle.id}*.safetensors")
    return handle, path


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize("harm", HARMS)
def test_attack_a_file_of_the_disk_tier_that_was_changed_is_computed_again(
    make_engine: MakeEngine, tmp_path: Path, harm: str, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    events = EventList()
    engine, plain = make_engine(disk=tmp_path, sink=events), make_engine()
    handle, path = parked(engine)
    HARMS[harm](path)
    engine.decode([7], [handle], sampling=Sampling(forced_token_ids=(5, 6), seed=1), timeout_s=20)
    plain.decode([7], [plain.prefill(TEXT)], sampling=Sampling(forced_token_ids=(5, 6), seed=2))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))
    assert (engine.stats().recomputed, engine.stats().restored_from_disk) == (1, 0)
    [skipped] = [event for event in events.events if isinstance(event, FileSkipped)]
    assert skipped.path == str(path) and skipped.reason


def test_attack_no_other_engines_file_is_believed(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Not even of the same tenant, words and place: the key is one engine's, and is gone with it."""
    one, other = (make_engine(disk=tmp_path, salt="s") for _ in range(2))
    (mine, path), (same, theirs) = parked(one), parked(other)
    assert mine == same and path != theirs
    shutil.copy(theirs, path)
    one.decode([7], [mine], sampling=Sampling(forced_token_ids=(5,)))
    assert (one.stats().recomputed, one.stats().restored_from_disk) == (1, 0)


def test_attack_what_a_killed_engine_has_left_is_removed_and_never_read(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_JUST_MADE_S", -1.0)
    living = make_engine(disk=tmp_path)
    handle, path = parked(living)
    left = path.parent.with_name("0" * 32)
    shutil.copytree(path.parent, left)
    make_engine(disk=tmp_path)
    assert not left.exists() and path.exists()
    living.decode([7], [handle], sampling=Sampling(forced_token_ids=(5,)))
    assert living.stats().restored_from_disk == 1


def test_attack_only_its_user_can_look_into_the_folders(make_engine: MakeEngine, tmp_path: Path) -> None:
    old = os.umask(0o002)
    try:
        disk, module_cache = tmp_path / "disk", tmp_path / "shelf"
        model = make_engine().model.adapter.fingerprint
        (disk / model).mkdir(parents=True)
        engine = make_engine(disk=disk, salt="s")
        handle, path = parked(engine)
        store = engine.kv.store(module_cache)
        assert store.save(engine.kv.key(handle), engine.kv.read(handle))
    finally:
        os.umask(old)
    made = [path.parent.parent, path.parent, module_cache, store.folder.parent, store.folder]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 5
    files = [path, *store.folder.iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2


@pytest.mark.parametrize("kind", ["disk", "shelf"])
@pytest.mark.parametrize("harm", ["another user's", "a link", "a place where everybody renames"])
def test_attack_a_folder_that_others_could_exchange_is_refused(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, harm: str
) -> None:
    engine = make_engine(salt="s")
    place = tmp_path / "place"
    if harm == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.mkdir()
        (place / engine.model.adapter.fingerprint).symlink_to(tmp_path / "elsewhere")
    elif harm == "another user's":
        (place / engine.model.adapter.fingerprint).mkdir(parents=True)
        monkeypatch.setattr(files_module, "_ours", lambda about: False)
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="use a folder of your own"):
        engine.kv.store(place) if kind == "shelf" else make_engine(disk=place)


def test_attack_what_outlives_an_engine_without_a_salt_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="salt="):
        engine.kv.store(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.tenant("a secret").kv.store(tmp_path)


@pytest.mark.parametrize("harm", [name for name in HARMS if name != "gone"])
def test_attack_a_file_that_outlives_its_engine_and_was_changed_is_set_aside(
    make_engine: MakeEngine, tmp_path: Path, harm: str
) -> None:
    events = EventList()
    engine = make_engine(salt="s", sink=events)
    store, handle = engine.kv.store(tmp_path), engine.prefill(TEXT)
    key, kv = engine.kv.key(handle), engine.kv.read(handle)
    assert store.save(key, kv) and store.load(key) is not None
    HARMS[harm](store.folder / f"{handle.id}.safetensors")
    assert store.load(key) is None
    [skipped] = [event for event in events.events if isinstance(event, FileSkipped)]
    assert skipped.path.endswith(f"{handle.id}.safetensors") and skipped.reason
    assert store.save(key, kv) and store.load(key) is not None


@pytest.mark.parametrize("harm", ["a pipe", "a link to a device", "a folder"])
def test_attack_what_stands_in_a_files_place_is_not_taken_for_one(
    make_engine: MakeEngine, tmp_path: Path, harm: str
) -> None:
    engine = make_engine(salt="s")
    store, handle = engine.kv.store(tmp_path), engine.prefill(TEXT)
    path = store.folder / f"{handle.id}.safetensors"
    path.touch()
    HARMS[harm](path)
    assert not store.has(handle.id)
    assert store.look() < 100


def test_attack_a_file_sealed_by_one_tenant_is_not_believed_by_another(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It says of itself all that the other asks for, and lies where the other looks: but it bears the wrong seal."""
    engine = make_engine(salt="mine")
    other = engine.tenant("other's")
    theirs = other.kv.store(tmp_path)
    key = other.kv.key(Prefill(TEXT))
    kv = engine.kv.read(engine.prefill(TEXT))
    place, geometry = theirs.folder.relative_to(tmp_path).parts, engine.model.adapter.geometry
    forged = HostKV(torch.ones_like(kv.keys), torch.ones_like(kv.values))
    assert KVStore(PersistentDirectory(tmp_path, *place), geometry, engine._tenant.message_ids.seal, 1 << 30).save(
        key, forged
    )
    assert theirs.load(key) is None
    assert theirs.save(key, kv) and theirs.load(key) is not None, "its own it believes"


def test_attack_an_engines_store_reads_nothing_that_it_has_not_written(tmp_path: Path) -> None:
    """The same bytes under another message's name, and what another engine has written into the same folder."""
    why: list[str] = []
    one, other = (
        KVStore(
            EngineDirectory(tmp_path, "model"),
            KVGeometry(1, 1, 8, torch.float32),
            key,
            1 << 20,
            lambda _, w: why.append(w),
        )
        for key in (b"one", b"other")
    )
    kv, key = HostKV(torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)), TierKey("a", 4, 7)
    assert one.save(key, kv) and other.save(key, kv)
    found = one.load(key)
    assert found is not None and torch.equal(found[0].keys, kv.keys) and found[1] == 7
    shutil.copy(one.folder / "a.safetensors", one.folder / "b.safetensors")
    assert one.load(TierKey("b", 4, 7)) is None
    shutil.copy(other.folder / "a.safetensors", one.folder / "a.safetensors")
    assert one.load(key) is None
    assert why == ["belongs to another message", "was changed, or signed with another key"]
    one.close()
    assert not one.folder.exists() and other.load(key) is not None
