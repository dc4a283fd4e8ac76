"""Encoded texts in every memory: brought back bit by bit, and from files that are never trusted."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MakeEngine
from support.encoded import (
    ALL,
    INNER,
    KEYS,
    LEFT,
    RIGHT,
    ROOT,
    TOKEN,
    MakeEncoded,
    encoded_by,
    files,
    kv,
    make_with,
    same,
    text,
    tokens,
)


@pytest.fixture
def make_encoded(make_engine: MakeEngine) -> MakeEncoded:
    return make_with(make_engine)


def test_texts_are_encoded_once_after_their_parents(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded()
    assert set(encoded.places().values()) == {"nowhere"} and engine.stats().messages == 0, "who looks holds nothing"
    encoded.prefetch(["inner"])
    [inner] = encoded.handles(["inner"])
    seen = [engine.tokens(handle) for handle in engine.inspect.ancestors(inner)]
    assert sorted(seen) == sorted([list(ROOT.tokens), list(LEFT.tokens)])
    assert [*encoded.places().values()] == ["device", "device", "nowhere", "device"]
    encoded.prefetch(KEYS)
    assert engine.stats().tokens_encoded == 128
    assert engine.stats().leases == 4


def test_nothing_is_encoded_before_it_is_read(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded()
    leases = encoded.lease(KEYS)
    assert engine.stats().tokens_encoded == 0 and engine.stats().leases == 8
    leases.release()
    engine.kv.read(*encoded.handles(["left"]))
    assert engine.stats().tokens_encoded == 64 and engine.stats().leases == 4


def test_a_sibling_changes_no_bit_of_a_text(make_encoded: MakeEncoded) -> None:
    one_engine, one = make_encoded()
    other_engine, other = make_encoded(None, [ROOT, LEFT, text("right", tokens(77, 40), 64, "root"), INNER])
    assert all(same(kv(one_engine, one, key), kv(other_engine, other, key)) for key in ("root", "left", "inner"))
    assert kv(one_engine, one, "right").keys.shape != kv(other_engine, other, "right").keys.shape
    other.encode(KEYS)
    changed = encoded_by(other_engine, [text("root", tokens(78), 0), LEFT, RIGHT, INNER])
    changed.take_over(other)
    assert set(changed.places().values()) == {"nowhere"}, "what attends to it is another text, too"
    changed.encode(KEYS)
    assert not same(kv(one_engine, one, "inner"), kv(other_engine, changed, "inner"))
    assert other_engine.stats().messages == 4


def test_what_two_schemas_of_a_name_have_in_common_is_kept(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded()
    encoded.pin()
    changed = encoded_by(engine, [ROOT, LEFT, text("right", tokens(77, 40), 64, "root")])
    changed.take_over(encoded)
    assert changed.places() == {"root": "device", "left": "device", "right": "nowhere"} and not changed.pinned
    assert engine.stats().leases == 3
    changed.close()
    assert engine.stats().leases == engine.stats().messages == 0


def test_files_give_other_engines_the_same_bits(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(KEYS)
    wanted = {key: kv(engine, encoded, key) for key in KEYS}
    assert len(files(tmp_path)) == 4
    again, other = make_encoded(tmp_path)
    assert set(other.places().values()) == {"disk"}
    assert all(same(kv(again, other, key), wanted[key]) for key in reversed(KEYS))
    assert again.stats().tokens_encoded == 0 and again.stats().restored_from_disk == 4


def test_what_was_evicted_is_read_again_and_not_computed(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(KEYS)
    wanted = {key: kv(engine, encoded, key) for key in KEYS}
    encoded.evict(["left", "inner"])
    assert [*encoded.places().values()] == ["device", "disk", "device", "disk"]
    assert engine.stats().messages == 2
    assert all(same(kv(engine, encoded, key), wanted[key]) for key in KEYS)
    engine.kv.offload(encoded.handles(["right"]))  # the engine needs its memory for something else
    assert encoded.places()["right"] == "disk"
    assert same(kv(engine, encoded, "right"), wanted["right"])
    assert engine.stats().tokens_encoded == 128 and engine.stats().recomputed == 0 and engine.stats().leases == 4
    encoded.evict(KEYS, files=True)
    assert files(tmp_path) == [] and set(encoded.places().values()) == {"nowhere"}
    assert same(kv(engine, encoded, "root"), wanted["root"])
    assert engine.stats().tokens_encoded == 160


@pytest.mark.parametrize("damage", [lambda data: data[:-64], lambda data: data[:-1] + b"\x55", lambda _: b""])
def test_broken_files_are_set_aside_and_their_texts_encoded_again(
    make_encoded: MakeEncoded, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(KEYS)
    wanted = {key: kv(engine, encoded, key) for key in KEYS}
    names = files(tmp_path)
    for path in names[:3]:
        path.write_bytes(damage(path.read_bytes()))
    again, other = make_encoded(tmp_path)
    assert all(same(kv(again, other, key), wanted[key]) for key in KEYS)
    assert again.stats().recomputed == 3 and again.stats().restored_from_disk == 1
    again.kv.persist(other.handles(KEYS))
    again.kv.flush()
    assert len(files(tmp_path, ".broken")) == 3 and files(tmp_path) == names
    third, last = make_encoded(tmp_path)
    assert all(same(kv(third, last, key), wanted[key]) for key in KEYS) and third.stats().restored_from_disk == 4


def test_the_file_of_another_text_is_not_taken_for_its_own(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    twin = text("twin", tokens(9), 32, "root")  # in the place of `left`, as members of a union are
    engine, encoded = make_encoded(tmp_path, [*ALL, twin])
    wanted = kv(engine, encoded, "twin")
    encoded.encode([*KEYS, "twin"])
    left, own = (next(tmp_path.rglob(f"{handle.id}.safetensors")) for handle in encoded.handles(["left", "twin"]))
    own.write_bytes(left.read_bytes())
    again, other = make_encoded(tmp_path, [*ALL, twin])
    assert same(kv(again, other, "twin"), wanted)
    assert again.stats().recomputed == 1 and files(tmp_path, ".broken") == [own.with_suffix(".broken")]


def test_a_library_larger_than_the_memory_is_encoded_and_written(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    many = [text(f"text {number}", tokens(10 + number, 60), 0) for number in range(12)]
    engine, encoded = make_encoded(tmp_path, many, kv_budget_bytes=256 * TOKEN)
    encoded.encode(encoded.keys)
    assert len(files(tmp_path)) == 12 and engine.stats().tokens_encoded == 720
    again, other = make_encoded(tmp_path, many, kv_budget_bytes=256 * TOKEN)
    other.encode(other.keys)
    other.prefetch(other.keys)
    assert again.stats().tokens_encoded == 0


def test_scopes_of_callers_leave_the_leases_alone(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded()
    with engine.scope():
        encoded.lease(KEYS)
        encoded.prefetch(KEYS)
        [left] = encoded.handles(["left"])
    assert engine.kv.tiers([left])[0] is not None and engine.stats().leases == 4
    with engine.scope():
        encoded.lease(["left"])
        encoded.close()
        assert engine.kv.tiers([left])[0] is not None
    assert engine.kv.tiers([left]) == [None]


def test_calls_from_many_threads_encode_everything_once(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    engine, encoded = make_encoded(tmp_path)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            for _ in range(20):
                keys = rng.sample(KEYS, 2)
                leases = encoded.lease(keys)
                engine.kv.prefetch(leases.handles)
                for key, handle in zip(keys, leases.handles, strict=True):
                    assert engine.tokens(handle) == list(ALL[KEYS.index(key)].tokens)
                leases.release()
                if number == 0:
                    encoded.evict(rng.sample(KEYS, 1))
                    encoded.places()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    encoded.encode(KEYS)
    assert engine.stats().leases <= 4
    engine.check()


def test_a_broken_file_of_what_memory_has_lost_is_written_again(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(["root"])
    encoded.evict(["root"])
    assert encoded.places()["root"] == "disk"
    [path] = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    encoded.prefetch(["root"])
    engine.kv.flush()
    assert files(tmp_path) == [path] and len(path.read_bytes()) == len(whole)
    assert engine.stats().tokens_encoded == 32 and engine.stats().recomputed == 1


@pytest.mark.parametrize("way", ["encode", "prefetch"])
def test_what_was_lost_everywhere_is_encoded_and_written_again(
    make_encoded: MakeEncoded, tmp_path: Path, way: str
) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(KEYS)
    wanted = {key: kv(engine, encoded, key) for key in KEYS}
    engine.kv.offload()
    for path in files(tmp_path):
        path.unlink()  # by another process, for space
    getattr(encoded, way)(KEYS)
    engine.kv.flush()
    assert len(files(tmp_path)) == 4 and all(same(kv(engine, encoded, key), wanted[key]) for key in KEYS)


def unwritable(folder: Path) -> None:
    [own] = [path for path in folder.rglob("*") if path.is_dir() and not list(path.iterdir())]
    own.rmdir()
    own.write_text("no folder")


def test_a_folder_that_cannot_be_written_is_told_and_is_in_nobodys_way(
    make_encoded: MakeEncoded, tmp_path: Path
) -> None:
    engine, encoded = make_encoded(tmp_path)
    unwritable(tmp_path)
    with pytest.raises(OSError):
        encoded.encode(KEYS)
    encoded.prefetch(KEYS)
    assert engine.stats().tokens_encoded == 128, "it serves all the same"
    encoded.evict(KEYS)
    assert engine.stats().messages == 0


def test_leases_that_others_have_dropped_are_taken_again(make_encoded: MakeEncoded, tmp_path: Path) -> None:
    engine, encoded = make_encoded(tmp_path, [ROOT, LEFT])
    encoded.pin()
    engine.kv.flush()
    handles = encoded.handles(["root", "left"])
    for handle in handles:
        engine.release(handle)
    assert encoded.places()["left"] == "disk"
    assert encoded.handles(["root", "left"]) == handles and not encoded.pinned
    assert encoded.handles(["left"]) == handles[1:] and engine.tokens(handles[1]) == list(LEFT.tokens)
    encoded.unpin()
    assert engine.stats().leases == 2
    encoded.close()
    assert engine.stats().leases == 0


def test_what_is_pinned_or_needed_stays_until_that_is_over(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded(None, [ROOT])
    encoded.pin()
    encoded.pin()
    encoded.evict(["root"])
    engine.kv.offload()
    assert encoded.places() == {"root": "device"} and encoded.pinned
    leases = encoded.lease(["root"])
    encoded.unpin()
    encoded.evict(["root"])
    assert not encoded.pinned and engine.kv.tiers(leases.handles) == ["device"], "a caller's"
    leases.release()
    assert encoded.places() == {"root": "nowhere"} and engine.stats().leases == engine.stats().messages == 0
