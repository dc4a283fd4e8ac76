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
from choreo_agents.kv.store import store as store_module
from choreo_agents.kv.store.store import SUFFIX
from choreo_agents.kv.tiers import HostKV

GEOMETRY = KVGeometry(2, 1, 8, torch.float32)
TOKENS = 16
BYTES = GEOMETRY.bytes_per_token * TOKENS
FILE = BYTES + 400
"""More than a file has."""


def kv(seed: int, tokens: int = TOKENS) -> HostKV:
    rng = torch.Generator().manual_seed(seed)
    return HostKV(torch.randn(2, 1, tokens, 8, generator=rng), torch.randn(2, 1, tokens, 8, generator=rng))


PLACE = ("model", "tenant")


def key(name: str, at: int = 0, tokens: int = TOKENS) -> KVKey:
    return KVKey(name, "m", tuple(range(tokens)), (("parent", -3),), at)


def read(store: KVStore, name: str) -> tuple[HostKV, int] | None:
    return store.load(name, TOKENS)


def store(
    folder: Path,
    budget: int = 1 << 20,
    *,
    skipped: Callable[[Path, str], None] = lambda path, why: None,
) -> KVStore:
    return KVStore(folder, PLACE, GEOMETRY, b"key", budget, skipped)


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_a_file_gives_the_same_bits_and_says_where_they_were_encoded(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.save(key("a", 7), kv(1)) and one.knows("a")
    for each in (one, store(tmp_path)):
        assert each.knows("a") and each.has("a")
        found = read(each, "a")
        assert found is not None and same(found[0], kv(1)) and found[1] == 7


def test_a_file_is_known_to_other_threads_while_one_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, look, known = store(tmp_path), Path.lstat, list[bool]()
    assert one.save(key("a"), kv(1))

    def look_and_ask(path: Path) -> os.stat_result:
        known.append(one.knows("a"))
        return look(path)

    monkeypatch.setattr(Path, "lstat", look_and_ask)
    assert one.has("a") and known == [True]


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
    assert read(watching, "b") is None and skipped == ["is missing"] and not watching.knows("b")
    assert read(watching, "b") is None and len(skipped) == 1, "nobody is told of what was not expected"


def test_the_longest_unused_makes_room(tmp_path: Path) -> None:
    one = store(tmp_path, 3 * FILE)
    for age, name in enumerate("abc"):
        assert one.save(key(name), kv(age))
        os.utime(one.folder / f"{name}.safetensors", (age, age))
    assert read(one, "a") is not None, "used just now"
    assert one.save(key("d"), kv(9))
    assert [one.knows(name) for name in "abcd"] == [True, False, True, True] and one.look() <= one.budget_bytes


@pytest.mark.parametrize("budget", [BYTES - 1, BYTES])
def test_what_is_larger_than_the_budget_is_not_written_and_nothing_leaves_for_it(tmp_path: Path, budget: int) -> None:
    """With its header, neither."""
    one = store(tmp_path, budget)
    assert one.save(key("small", tokens=1), kv(1, tokens=1))
    assert not one.save(key("large"), kv(2)) and not one.knows("large") and one.has("small")


def test_a_budget_is_kept_however_many_write(tmp_path: Path) -> None:
    """As processes do: none knows what the others have written until it looks."""
    stores = [store(tmp_path, 20 * FILE) for _ in range(4)]
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
            assert read(each, path.stem) is not None


class Interruption:
    """Lets something happen when the folder of a store has been listed, before the list is used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.act: Callable[[], object] | None = None
        self._sizes = store_module.sizes
        monkeypatch.setattr(store_module, "sizes", self._listed)

    def _listed(self, folder: Path) -> Iterator[tuple[float, int, Path]]:
        listed = list(self._sizes(folder))
        act, self.act = self.act, None
        if act is not None:
            act()
        return iter(listed)


@pytest.mark.parametrize("written", [True, False], ids=["while-a-file-is-written", "while-looking"])
def test_a_file_that_is_set_aside_while_the_folder_is_listed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    place, one = Interruption(monkeypatch), store(tmp_path)
    assert one.save(key("broken"), kv(1))
    path = one.folder / f"broken{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1])
    one._spare_bytes = -1  # so that the next file makes the store look at the folder
    reading = threading.Thread(target=read, args=[one, "broken"])
    place.act = lambda: (reading.start(), reading.join(0.3))  # long enough to read it, if nothing is locked
    if written:
        assert one.save(key("other"), kv(2))
    else:
        one.look()
    assert place.act is None, "the folder was not listed"
    reading.join(60)
    assert not one.knows("broken")
    assert one.save(key("broken"), kv(1)) and read(one, "broken") is not None


def test_a_file_that_is_found_while_the_folder_is_listed_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, mine, theirs = Interruption(monkeypatch), store(tmp_path), store(tmp_path)
    looking = threading.Thread(target=lambda: theirs.save(key("a"), kv(1)) and mine.has("a"))
    place.act = lambda: (looking.start(), looking.join(0.3))
    mine.look()
    looking.join(60)
    assert mine.knows("a")


def test_two_that_write_one_message_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    stores, go = [store(tmp_path) for _ in range(4)], threading.Barrier(4)

    def write(each: KVStore) -> None:
        for number in range(30):
            go.wait(60)
            each.save(key(str(number)), kv(number))
            found = read(each, str(number))
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

    monkeypatch.setattr(store_module.os, "fstat", replaced)
    times[0] = 3
    found = read(one, "a")
    assert found is not None and same(found[0], kv(1)) and times == [0]
    times[0] = 1000
    assert read(one, "a") is None and path.with_suffix(".broken").exists()


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
    assert read(one, "a") is None and one.save(key("a"), kv(1))


def test_what_was_left_half_written_is_removed_when_it_is_old(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.save(key("a"), kv(1))
    old, new = one.folder / "b.1.partial", one.folder / "c.2.partial"
    old.touch(), new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    store(tmp_path)
    assert not old.exists() and new.exists() and one.has("a")
