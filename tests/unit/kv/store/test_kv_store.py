"""Files of KV: whole or not there, within a budget that several write to, and found by what they are of."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.tuning import full_disk

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store import KVKey, KVStore
from choreo_agents.kv.store import files as files_module
from choreo_agents.kv.store.files import SUFFIX, EngineDirectory, PersistentDirectory
from choreo_agents.kv.store.key import FileKey, TierKey
from choreo_agents.kv.tiers import HostKV

GEOMETRY = KVGeometry(2, 1, 8, torch.float32)
TOKENS = 16
BYTES = GEOMETRY.bytes_per_token * TOKENS
FILE = BYTES + 400
"""More than a file has."""


def kv(seed: int, tokens: int = TOKENS) -> HostKV:
    rng = torch.Generator().manual_seed(seed)
    return HostKV(torch.randn(2, 1, tokens, 8, generator=rng), torch.randn(2, 1, tokens, 8, generator=rng))


def key(name: str, at: int = 0) -> TierKey:
    return TierKey(name, TOKENS, at)


def store(
    folder: Path,
    budget: int = 1 << 20,
    *,
    removed: Callable[[str], None] = lambda _: None,
    skipped: Callable[[Path, str], None] = lambda path, why: None,
) -> KVStore:
    return KVStore(PersistentDirectory(folder, "model", "tenant"), GEOMETRY, b"key", budget, skipped, removed)


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize(
    "named",
    [TierKey("a", TOKENS, 7), KVKey("a", "m", tuple(range(TOKENS)), (("parent", -3),), 7)],
    ids=["tier", "full"],
)
def test_a_file_gives_the_same_bits_and_says_where_they_were_encoded(tmp_path: Path, named: FileKey) -> None:
    one = store(tmp_path)
    assert one.save(named, kv(1)) and one.knows("a")
    for each in (one, store(tmp_path)):
        assert each.knows("a") and each.has("a")
        for asked in (named, TierKey("a", TOKENS, 99)):
            found = each.load(asked)
            assert found is not None and same(found[0], kv(1)) and found[1] == 7


def test_a_whole_key_is_asked_for_as_a_whole(tmp_path: Path) -> None:
    why: list[str] = []
    one = store(tmp_path, skipped=lambda path, each: why.append(each))
    mine = KVKey("a", "m", tuple(range(TOKENS)), (), 0)
    assert one.save(mine, kv(1))
    assert one.load(KVKey("a", "other", mine.tokens, (), 0)) is None and why == ["belongs to another message"]
    assert not one.has("a") and [path.suffix for path in one.folder.iterdir()] == [".broken"]


def test_what_others_write_is_found_once_it_is_looked_for(tmp_path: Path) -> None:
    mine, theirs = store(tmp_path), store(tmp_path)
    assert theirs.save(key("a"), kv(1)) and theirs.save(key("b"), kv(2))
    assert not mine.knows("a") and mine.has("a") and mine.knows("a") and not mine.knows("b")
    mine.look()
    assert mine.knows("b")
    theirs.drop("a")
    skipped: list[str] = []
    assert mine.knows("a") and not mine.has("a") and not mine.knows("a")
    watching = store(tmp_path, skipped=lambda path, why: skipped.append(why))
    theirs.drop("b")
    assert watching.load(key("b")) is None and skipped == ["is missing"] and not watching.knows("b")
    assert watching.load(key("b")) is None and len(skipped) == 1, "nobody is told of what was not expected"


def test_the_longest_unused_makes_room_and_its_owner_is_told(tmp_path: Path) -> None:
    removed: list[str] = []
    one = store(tmp_path, 3 * FILE, removed=removed.append)
    for age, name in enumerate("abc"):
        assert one.save(key(name), kv(age))
        os.utime(one.folder / f"{name}.safetensors", (age, age))
    assert one.load(key("a")) is not None, "used just now"
    assert one.save(key("d"), kv(9)) and removed == ["b"]
    assert [one.knows(name) for name in "abcd"] == [True, False, True, True] and one.look() <= one.budget_bytes


@pytest.mark.parametrize("budget", [BYTES - 1, BYTES])
def test_what_is_larger_than_the_budget_is_not_written_and_nothing_leaves_for_it(tmp_path: Path, budget: int) -> None:
    """With its header, neither."""
    one = store(tmp_path, budget)
    assert one.save(TierKey("small", 1, 0), kv(1, tokens=1))
    assert not one.save(key("large"), kv(2)) and not one.knows("large") and one.has("small")


@pytest.mark.parametrize("kind", ["lasting", "engine"])
def test_a_budget_is_kept_however_many_write(tmp_path: Path, kind: str) -> None:
    """As processes do: none knows what the others have written until it looks."""

    def made() -> KVStore:
        place = (
            PersistentDirectory(tmp_path, "model", "tenant")
            if kind == "lasting"
            else EngineDirectory(tmp_path, "model")
        )
        return KVStore(place, GEOMETRY, b"key", 20 * FILE)

    stores = [made() for _ in range(4)]
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for each in range(25):
                name = f"{each % 5}" if each % 3 == 0 else f"{number}-{each}"  # some are everybody's
                stores[number].save(key(name), kv(each % 5 if each % 3 == 0 else 100 * number + each))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not errors and len(files) >= 12 and sum(path.stat().st_size for path in files) <= 20 * FILE
    assert {path.suffix for path in files} == {".safetensors"}
    for each in stores:
        for path in each.folder.iterdir():
            assert each.load(key(path.stem)) is not None


class InterruptedPlace(PersistentDirectory):
    """A place that lets something happen when its folder has been listed, before the list is used."""

    interruption: Callable[[], object] | None = None

    def files(self) -> Iterator[tuple[float, int, Path]]:
        listed = list(super().files())
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            interruption()
        return iter(listed)


@pytest.mark.parametrize("written", [True, False], ids=["while-a-file-is-written", "while-looking"])
def test_a_file_that_is_set_aside_while_the_folder_is_listed_is_written_again(tmp_path: Path, written: bool) -> None:
    place = InterruptedPlace(tmp_path, "model", "tenant")
    one = KVStore(place, GEOMETRY, b"key", 1 << 20)
    assert one.save(key("broken"), kv(1))
    path = one.folder / f"broken{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1])
    one._spare_bytes = -1  # so that the next file makes the store look at the folder
    reading = threading.Thread(target=one.load, args=[key("broken")])
    place.interruption = lambda: (reading.start(), reading.join(0.3))  # long enough to read it, if nothing is locked
    if written:
        assert one.save(key("other"), kv(2))
    else:
        one.look()
    assert place.interruption is None, "the folder was not listed"
    reading.join(60)
    assert not one.knows("broken")
    assert one.save(key("broken"), kv(1)) and one.load(key("broken")) is not None


def test_a_file_that_is_found_while_the_folder_is_listed_is_known(tmp_path: Path) -> None:
    place = InterruptedPlace(tmp_path, "model", "tenant")
    mine, theirs = KVStore(place, GEOMETRY, b"key", 1 << 20), store(tmp_path)
    looking = threading.Thread(target=lambda: theirs.save(key("a"), kv(1)) and mine.has("a"))
    place.interruption = lambda: (looking.start(), looking.join(0.3))
    mine.look()
    looking.join(60)
    assert mine.knows("a")


def test_two_that_write_one_message_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    stores, go = [store(tmp_path) for _ in range(4)], threading.Barrier(4)

    def write(each: KVStore) -> None:
        for number in range(30):
            go.wait(60)
            each.save(key(str(number)), kv(number))
            found = each.load(key(str(number)))
            assert found is not None and same(found[0], kv(number))

    threads = [threading.Thread(target=write, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in stores[0].folder.iterdir()) == sorted(f"{n}.safetensors" for n in range(30))


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who has written the same message at once; somebody who does nothing else is not waited for."""
    one, fstat, times = store(tmp_path), os.fstat, [0]
    assert one.save(key("a"), kv(1))
    path = one.folder / "a.safetensors"

    def replaced(descriptor: int) -> os.stat_result:
        if times[0] and path.exists():
            times[0] -= 1
            path.with_suffix(".new").write_bytes(path.read_bytes())
            path.with_suffix(".new").replace(path)
        return fstat(descriptor)

    monkeypatch.setattr(files_module.os, "fstat", replaced)
    times[0] = 3
    found = one.load(key("a"))
    assert found is not None and same(found[0], kv(1)) and times == [0]
    times[0] = 1000
    assert one.load(key("a")) is None and path.with_suffix(".broken").exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    one = store(tmp_path)
    with full_disk(100), pytest.raises(OSError):
        one.save(key("a"), kv(1))
    assert not one.has("a") and list(one.folder.iterdir()) == []
    assert one.save(key("a"), kv(1))


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.save(key("a"), kv(1))
    one.drop("a")
    one.folder.rmdir()
    assert one.load(key("a")) is None and one.save(key("a"), kv(1))


def test_what_was_left_half_written_is_removed_when_it_is_old(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.save(key("a"), kv(1))
    old, new = one.folder / "b.1.partial", one.folder / "c.2.partial"
    old.touch(), new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    store(tmp_path)
    assert not old.exists() and new.exists() and one.has("a")


def test_an_engine_removes_and_counts_what_engines_have_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder for both: what outlives engines stands beside what they leave."""
    monkeypatch.setattr(files_module, "_JUST_MADE_S", -1.0)
    lasting = KVStore(PersistentDirectory(tmp_path, "model", "0" * 16), GEOMETRY, b"key", 1 << 20)
    assert lasting.save(key("a"), kv(1))
    (tmp_path / "model" / ("f" * 32)).mkdir()
    removed: list[str] = []
    own = KVStore(EngineDirectory(tmp_path, "model"), GEOMETRY, b"own", FILE, removed=removed.append)
    assert not (tmp_path / "model" / ("f" * 32)).exists() and lasting.has("a")
    assert own.save(key("b"), kv(2)) and own.save(key("c"), kv(3))
    assert removed == ["b"] and lasting.has("a") and own.has("c")
    own.close()
    assert not own.folder.exists() and lasting.load(key("a")) is not None
