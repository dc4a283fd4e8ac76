"""Encoded texts in every memory: brought back bit by bit, and from files that are never trusted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine

from choreo_agents import Engine
from choreo_agents.engine.persistent_kv import WantedKV
from choreo_agents.kv.store import KVKey
from choreo_agents.kv.tiers import HostKV
from choreo_agents.pml.compiler import SchemaPiece
from choreo_agents.pml.library import ModuleCache, flush_kv

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""


def tokens(seed: int, count: int = 32) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 360) for _ in range(count))


def text(key: str, words: tuple[int, ...], start: int, *parents: str) -> SchemaPiece:
    return SchemaPiece(key, (key,), words, start, parents, None, True, False)


ROOT, LEFT, RIGHT = (
    text("root", tokens(0), 0),
    text("left", tokens(1), 32, "root"),
    text("right", tokens(2), 64, "root"),
)
INNER = text("inner", tokens(3), 100, "root", "left")
ALL = [ROOT, LEFT, RIGHT, INNER]
KEYS = [piece.key for piece in ALL]

MakeModuleCache = Callable[..., tuple[Engine, ModuleCache]]


@pytest.fixture
def make_module_cache(make_engine: MakeEngine) -> Iterator[MakeModuleCache]:
    with ExitStack() as stack:

        def make(
            folder: Path | None = None, pieces: Sequence[SchemaPiece] = ALL, **options: Any
        ) -> tuple[Engine, ModuleCache]:
            engine = make_engine(**({"salt": "s"} | options))
            kept = None if folder is None else engine.kv.persistent_kv(engine.kv.store(folder))
            module_cache = ModuleCache(engine, kept)
            module_cache.know("s", pieces)
            stack.callback(lambda: kept.close() if kept is not None else None)
            return engine, module_cache

        yield make


def flush(module_cache: ModuleCache) -> None:
    assert module_cache._persistent is not None
    flush_kv(module_cache._persistent)


def kv(engine: Engine, module_cache: ModuleCache, key: str) -> HostKV:
    with module_cache.brought([key]) as handles:
        return engine.kv.read(handles[key])


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def files(folder: Path, suffix: str = ".safetensors") -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


def test_texts_are_encoded_once_after_their_parents(make_module_cache: MakeModuleCache) -> None:
    engine, module_cache = make_module_cache()
    assert {module_cache.place(key)[0] for key in KEYS} == {"nowhere"}
    with module_cache.brought(["inner"]) as handles:
        assert list(handles) == ["inner"]
        seen = [engine.tokens(handle) for handle in engine.inspect.ancestors(handles["inner"])]
    assert sorted(seen) == sorted([list(ROOT.tokens), list(LEFT.tokens)])
    assert [module_cache.place(key)[0] for key in KEYS] == ["device", "device", "nowhere", "device"]
    with module_cache.brought(KEYS):
        assert engine.stats().tokens_encoded == 128
    assert engine.stats().leases == 4


def test_a_sibling_changes_no_bit_of_a_text(make_module_cache: MakeModuleCache) -> None:
    one_engine, one = make_module_cache()
    other_engine, other = make_module_cache()
    other.know("s", [ROOT, LEFT, text("right", tokens(77, 40), 64, "root"), INNER])
    with one.brought(KEYS), other.brought(KEYS):
        assert all(same(kv(one_engine, one, key), kv(other_engine, other, key)) for key in ("root", "left", "inner"))
        assert kv(one_engine, one, "right").keys.shape != kv(other_engine, other, "right").keys.shape
    other.know("s", [text("root", tokens(78), 0), LEFT, RIGHT, INNER])
    assert {other.place(key)[0] for key in KEYS} == {"nowhere"}, "what attends to it is another text, too"
    with other.brought(KEYS):
        assert not same(kv(one_engine, one, "inner"), kv(other_engine, other, "inner"))
        assert other_engine.stats().messages == 4


def test_files_give_other_engines_the_same_bits(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    wanted = {key: kv(engine, module_cache, key) for key in KEYS}
    flush(module_cache)
    assert len(files(tmp_path)) == 4
    again, other = make_module_cache(tmp_path)
    assert {other.place(key)[0] for key in KEYS} == {"disk"}
    assert all(same(kv(again, other, key), wanted[key]) for key in reversed(KEYS))
    assert again.stats().tokens_encoded == 0 and again.stats().adopted == 4


def test_what_was_evicted_is_read_again_and_not_computed(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    wanted = {key: kv(engine, module_cache, key) for key in KEYS}
    module_cache.evict(["left", "inner"])
    assert [module_cache.place(key)[0] for key in KEYS] == ["device", "disk", "device", "disk"]
    assert engine.stats().messages == 2
    assert all(same(kv(engine, module_cache, key), wanted[key]) for key in KEYS)
    with module_cache.brought(["right"]) as handles:
        engine.kv.offload(list(handles.values()))  # the engine needs its memory for something else
        assert module_cache.place("right")[0] == "disk"
        assert same(kv(engine, module_cache, "right"), wanted["right"])
    assert engine.stats().tokens_encoded == 128 and engine.stats().recomputed == 0 and engine.stats().leases == 4
    module_cache.evict(KEYS, files=True)
    assert files(tmp_path) == [] and {module_cache.place(key)[0] for key in KEYS} == {"nowhere"}
    assert same(kv(engine, module_cache, "root"), wanted["root"])
    assert engine.stats().tokens_encoded == 160


@pytest.mark.parametrize("damage", [lambda data: data[:-64], lambda data: data[:-1] + b"\x55", lambda _: b""])
def test_broken_files_are_set_aside_and_their_texts_encoded_again(
    make_module_cache: MakeModuleCache, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    wanted = {key: kv(engine, module_cache, key) for key in KEYS}
    flush(module_cache)
    names = files(tmp_path)
    for path in names[:3]:
        path.write_bytes(damage(path.read_bytes()))
    again, other = make_module_cache(tmp_path)
    assert all(same(kv(again, other, key), wanted[key]) for key in KEYS)
    assert again.stats().tokens_encoded == 96 and again.stats().adopted == 1
    flush(other)
    assert len(files(tmp_path, ".broken")) == 3 and files(tmp_path) == names
    third, last = make_module_cache(tmp_path)
    assert all(same(kv(third, last, key), wanted[key]) for key in KEYS) and third.stats().adopted == 4


def test_the_file_of_another_text_is_not_taken_for_its_own(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    twin = text("twin", tokens(9), 32, "root")  # in the place of `left`, as members of a union are
    engine, module_cache = make_module_cache(tmp_path, [*ALL, twin])
    wanted = kv(engine, module_cache, "twin")
    with module_cache.brought(["left", "twin"]) as handles:
        flush(module_cache)
        left, own = (next(tmp_path.rglob(f"{handle.id}.safetensors")) for handle in handles.values())
    own.write_bytes(left.read_bytes())
    again, other = make_module_cache(tmp_path, [*ALL, twin])
    assert same(kv(again, other, "twin"), wanted)
    assert again.stats().tokens_encoded == 32 and files(tmp_path, ".broken") == [own.with_suffix(".broken")]


def test_a_library_larger_than_the_memory_is_encoded_and_written(
    make_module_cache: MakeModuleCache, tmp_path: Path
) -> None:
    many = [text(f"text {number}", tokens(10 + number, 60), 0) for number in range(12)]
    engine, module_cache = make_module_cache(tmp_path, many, kv_budget_bytes=256 * TOKEN)
    with module_cache.brought([piece.key for piece in many], patient=True):
        pass
    assert len(files(tmp_path)) == 12 and engine.stats().tokens_encoded == 720
    again, other = make_module_cache(tmp_path, many, kv_budget_bytes=256 * TOKEN)
    for piece in many:
        with other.brought([piece.key]):
            pass
    assert again.stats().tokens_encoded == 0


def test_scopes_of_callers_leave_the_leases_alone(make_module_cache: MakeModuleCache) -> None:
    engine, module_cache = make_module_cache()
    with engine.scope(), module_cache.brought(KEYS) as handles:
        kept = handles["left"]
    assert engine.kv.tiers([kept])[0] is not None and engine.stats().leases == 4
    with engine.scope(), module_cache.brought(["left"]) as handles:
        engine.kv.lease(list(handles.values()))
        module_cache.know("s", [ROOT, RIGHT])
        assert engine.kv.tiers([kept])[0] is not None
    assert engine.kv.tiers([kept]) == [None]


def test_calls_from_many_threads_encode_everything_once(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            for _ in range(20):
                with module_cache.brought(rng.sample(KEYS, 2)) as handles:
                    for key, handle in handles.items():
                        assert engine.tokens(handle) == list(ALL[KEYS.index(key)].tokens)
                if number == 0:
                    module_cache.evict(rng.sample(KEYS, 1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    flush(module_cache)
    assert engine.stats().leases <= 4 and len(files(tmp_path)) == 4


def test_nobody_waits_for_what_only_another_needs_nor_fails_with_it(
    make_module_cache: MakeModuleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, module_cache = make_module_cache()
    inside, go_on, prefill = threading.Event(), threading.Event(), engine.prefill

    def failing(*args: Any) -> Any:
        monkeypatch.setattr(engine, "prefill", prefill)
        inside.set()
        go_on.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "prefill", failing)

    ended: list[type[BaseException]] = []

    def first() -> None:
        try:
            with module_cache.brought(["root"]):
                pass
        except BaseException as error:
            ended.append(type(error))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with module_cache.brought(["root"]) as there:
        assert engine.tokens(there["root"])
    assert not ended, "it waits still"
    go_on.set()
    thread.join()
    assert ended == [KeyboardInterrupt] and module_cache.place("root")[0] == "device" and engine.stats().leases == 1


def test_a_file_is_read_once_for_all_who_wait_for_it(
    make_module_cache: MakeModuleCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, filling = make_module_cache(tmp_path)
    with filling.brought(["root"]):
        flush(filling)
    engine, module_cache = make_module_cache(tmp_path)
    store = module_cache._persistent.store if module_cache._persistent is not None else None
    assert store is not None
    load, reads, waiting = store.load, list[str](), threading.Barrier(3)
    filed, asked, all_asked = module_cache._has_file, list[bool](), threading.Event()

    def counted(slot: Any) -> bool:
        asked.append(filed(slot))
        if len(asked) == 3:
            all_asked.set()
        return asked[-1]

    def slowly(key: Any) -> Any:
        reads.append(key.id)
        assert all_asked.wait(60)
        return load(key)

    monkeypatch.setattr(store, "load", slowly)
    monkeypatch.setattr(module_cache, "_has_file", counted)

    brought: list[list[int]] = []

    def bring() -> None:
        waiting.wait(60)
        with module_cache.brought(["root"]) as there:
            brought.append(engine.tokens(there["root"]))
            waiting.wait(60)

    threads = [threading.Thread(target=bring) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    stats = engine.stats()
    assert len(reads) == 1 and stats.tokens_encoded == 0 and stats.leases == 1
    assert brought == [list(ROOT.tokens)] * 3


def test_a_broken_file_of_what_memory_has_lost_is_written_again(
    make_module_cache: MakeModuleCache, tmp_path: Path
) -> None:
    _, module_cache = make_module_cache(tmp_path)
    with module_cache.brought(["root"]):
        pass
    module_cache.evict(["root"])
    assert module_cache.place("root")[0] == "disk"
    [path] = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with module_cache.brought(["root"]):
        pass
    flush(module_cache)
    assert files(tmp_path) == [path] and len(path.read_bytes()) == len(whole)


def test_who_fails_while_files_are_read_leaves_nothing_leased(
    make_module_cache: MakeModuleCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, filling = make_module_cache(tmp_path)
    with filling.brought(["left"]):
        flush(filling)
    engine, module_cache = make_module_cache(tmp_path)

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "prefill", fail)
    with pytest.raises(KeyboardInterrupt), module_cache.brought(["left", "right"]):
        pass
    assert engine.stats().leases == 2, "the shelf's, of what was read"
    module_cache.know("s", ())
    assert engine.stats().leases == 0


OTHER_PROCESS = """
import json, sys
import torch
from choreo_agents import Engine, Memory
from choreo_agents.pml.compiler import SchemaPiece
from choreo_agents.pml.library import ModuleCache
model, folder, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
    kept = engine.kv.persistent_kv(engine.kv.store(folder))
    module_cache = ModuleCache(engine, kept)
    module_cache.know("s", [SchemaPiece(k, (k,), tuple(t), s, tuple(p), None, True, False) for k, t, s, p in texts])
    print("ready", flush=True)
    sys.stdin.readline()
    with module_cache.brought([each[0] for each in texts]) as handles:
        sums = [engine.kv.read(handle).keys.double().sum().item() for handle in handles.values()]
    kept.close()
    print(json.dumps([engine.stats().tokens_encoded, engine.stats().adopted, sums]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_share_a_folder(make_module_cache: MakeModuleCache, tiny_path: Path, tmp_path: Path) -> None:
    written = json.dumps([[r.key, r.tokens, r.start, r.parents] for r in ALL])
    command = [sys.executable, "-c", OTHER_PROCESS, str(tiny_path), str(tmp_path), written]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None and process.stdout.readline() == "ready\n"
        engine, module_cache = make_module_cache(tmp_path)
        process.stdin.write("\n")
        process.stdin.flush()
        sums = [kv(engine, module_cache, key).keys.double().sum().item() for key in KEYS]
        encoded, adopted, theirs = json.loads(process.stdout.readline())
    assert encoded + 32 * adopted == 128 and theirs == sums, "at the same time: neither trips over the other"
    flush(module_cache)
    assert len(files(tmp_path)) == 4 and not files(tmp_path, ".broken") and not files(tmp_path, ".partial")
    again, other = make_module_cache(tmp_path)
    assert [kv(again, other, key).keys.double().sum().item() for key in KEYS] == sums
    assert again.stats().tokens_encoded == 0, "afterwards: nothing is encoded"


def test_a_folder_that_cannot_be_written_is_told(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    [folder] = [path for path in tmp_path.rglob("*") if path.is_dir() and not list(path.iterdir())]
    folder.rmdir()
    folder.write_text("no folder")
    with module_cache.brought(KEYS):
        assert engine.stats().tokens_encoded == 128, "it serves all the same"
    with pytest.raises(OSError):
        flush(module_cache)
    flush(module_cache)


def test_leases_that_others_have_dropped_are_taken_again(make_module_cache: MakeModuleCache, tmp_path: Path) -> None:
    engine, module_cache = make_module_cache(tmp_path, [ROOT, LEFT])
    module_cache.pin()
    with module_cache.brought(["root", "left"]) as handles:
        pass
    flush(module_cache)
    for handle in handles.values():
        engine.release(handle)
    assert module_cache.place("left") == ("disk", False)
    with module_cache.brought(["left"]) as again:
        assert again["left"] == handles["left"] and engine.tokens(again["left"]) == list(LEFT.tokens)
    assert engine.stats().leases == 2
    module_cache.know("s", ())
    assert engine.stats().leases == 0


def test_eviction_is_not_kept_from_by_a_folder_that_cannot_be_written(
    make_module_cache: MakeModuleCache, tmp_path: Path
) -> None:
    engine, module_cache = make_module_cache(tmp_path)
    [folder] = [path for path in tmp_path.rglob("*") if path.is_dir() and not list(path.iterdir())]
    folder.rmdir()
    folder.write_text("no folder")
    with module_cache.brought(["root"]):
        pass
    module_cache.evict(["root"])
    assert engine.stats().messages == 0
    with pytest.raises(OSError):
        flush(module_cache)


def test_files_that_were_evicted_do_not_come_back_from_who_still_writes_them(
    make_module_cache: MakeModuleCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was encoded after eviction had waited for the writer is still to be written when it removes files."""
    _, module_cache = make_module_cache(tmp_path)
    assert module_cache._persistent is not None
    inside, gate, read, wait = threading.Event(), threading.Event(), WantedKV.read, module_cache._persistent.wait

    def late(wanted: WantedKV) -> tuple[KVKey, HostKV]:
        inside.set()
        assert gate.wait(20)
        return read(wanted)

    def waited() -> None:
        wait()
        if not inside.is_set():
            with module_cache.brought(["root"]):
                assert inside.wait(20)
            threading.Timer(0.05, gate.set).start()

    monkeypatch.setattr(WantedKV, "read", late)
    monkeypatch.setattr(module_cache._persistent, "wait", waited)
    module_cache.evict(["root"], files=True)
    assert inside.is_set() and files(tmp_path) == [] and module_cache.place("root")[0] == "nowhere"
    flush(module_cache)
    assert files(tmp_path) == []


def test_what_is_pinned_or_needed_stays_until_that_is_over(make_module_cache: MakeModuleCache) -> None:
    engine, module_cache = make_module_cache(None, [ROOT])
    module_cache.pin()
    module_cache.evict(["root"])
    assert module_cache.place("root") == ("device", True)
    with module_cache.brought(["root"]) as handles:
        module_cache.unpin()
        module_cache.evict(["root"])
        assert module_cache.place("root") == ("nowhere", False) and engine.kv.tiers([handles["root"]]) == ["device"]
    assert engine.stats().leases == engine.stats().messages == 0
