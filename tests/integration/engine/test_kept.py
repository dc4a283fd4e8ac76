"""KV that outlives its engine: written beside the steps, and read again wherever it was lost, bit by bit."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from integration.engine.test_attack_files import HARMS
from support.adapters import save_adapter, save_mapper
from support.tuning import full_disk

from choreo_agents import Decode, Engine, Memory, MessageHandle, Prefill, Sampling
from choreo_agents.engine import persistent_kv as kept_module
from choreo_agents.engine.persistent_kv import WantedKV
from choreo_agents.errors import CapacityError, EngineClosedError, HandleError, InvalidRequestError
from choreo_agents.kv.store import KVKey, KVStore
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import CacheWriteFailed, EventList, FileSkipped

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
Logits = dict[int, list[torch.Tensor]]


def words(number: int, count: int = 24) -> list[int]:
    return [3 + (7 * number + 11 * place) % 300 for place in range(count)]


def calls(seen: list[MessageHandle], number: int, **options: Any) -> Prefill:
    return Prefill(words(number), list(seen), [31 * at for at in range(len(seen))], 100, **options)


def chain(engine: Engine, length: int = 3, **options: Any) -> list[MessageHandle]:
    """Messages each of which sees those before it, at odd places."""
    made: list[MessageHandle] = []
    for number in range(length):
        made += engine.prefill([calls(made, number, **options)])
    return made


def answer(engine: Engine, seen: list[MessageHandle], seed: int) -> None:
    engine.release(engine.decode([7, 8], seen, None, 300, sampling=Sampling(forced_token_ids=(5, 6, 9), seed=seed)))


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def files(folder: Path, suffix: str = ".safetensors") -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


def kept_by(engine: Engine, folder: Path) -> tuple[list[MessageHandle], list[HostKV]]:
    made = chain(engine)
    engine.kv.persist(made)
    engine.kv.flush()
    assert {path.stem for path in files(folder)} == {handle.id for handle in made}
    return made, [engine.kv.read(handle) for handle in made]


class Gate:
    """Holds up who reads what is to be written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.inside, self.open = threading.Event(), threading.Event()
        read = WantedKV.read

        def late(wanted: WantedKV) -> tuple[KVKey, HostKV]:
            self.inside.set()
            assert self.open.wait(60)
            return read(wanted)

        patch.setattr(WantedKV, "read", late)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_next_engine_reads_what_was_kept_bit_by_bit(
    make_engine: MakeEngine, tmp_path: Path, logits_by_seed: Logits, lazy: bool
) -> None:
    one = make_engine(persist_dir=tmp_path, salt="s")
    made, bits = kept_by(one, tmp_path)
    answer(one, made, 1)
    one.close()
    other = make_engine(persist_dir=tmp_path, salt="s")
    assert chain(other, lazy=lazy) == made and other.kv.tiers(made) == ["disk"] * 3
    assert other.kv.memory_map().authors[""].tokens["disk"] == 72
    answer(other, made, 2)
    stats = other.stats()
    assert (stats.restored_from_disk, stats.recomputed, stats.tokens_encoded, stats.lost) == (3, 0, 2 + 3, 0)
    assert other.kv.tiers(made) == ["device"] * 3
    assert all(same(other.kv.read(handle), kv) for handle, kv in zip(made, bits, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))


def test_an_engine_that_starts_again_reads_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, bits = kept_by(engine, tmp_path)
    engine.admin.restart()
    assert engine.kv.tiers(made) == ["disk"] * 3
    assert all(same(engine.kv.read(handle), kv) for handle, kv in zip(made, bits, strict=True))
    assert (engine.stats().restored_from_disk, engine.stats().recomputed) == (3, 0)


@pytest.mark.parametrize("tiers", ["none", "host", "tight", "disk"])
def test_what_left_memory_is_read_from_there(make_engine: MakeEngine, tmp_path: Path, tiers: str) -> None:
    own = tmp_path / "own"
    memory = {"none": {}, "host": {"host_bytes": 1 << 20}, "tight": {"host_bytes": 30 * TOKEN}, "disk": {"disk": own}}
    engine = make_engine(persist_dir=tmp_path / "kept", salt="s", **memory[tiers])
    made, bits = kept_by(engine, tmp_path / "kept")
    for _ in range(2):
        engine.kv.offload()
        found = engine.kv.tiers(made)
        assert found.count("host") == {"host": 3, "tight": 1}.get(tiers, 0) and "lineage" not in found
        assert all(same(engine.kv.read(handle), kv) for handle, kv in zip(made, bits, strict=True))
    stats = engine.stats()
    assert stats.restored_from_host + stats.restored_from_disk == 6 and stats.recomputed == stats.lost == 0
    assert files(own) == [], "one file is enough"


def test_it_is_shown_where_it_was_not_encoded(make_engine: MakeEngine, tmp_path: Path, logits_by_seed: Logits) -> None:
    one, plain = make_engine(persist_dir=tmp_path, salt="s"), make_engine()
    one.kv.persist([one.prefill(words(1))])
    one.kv.flush()
    other = make_engine(persist_dir=tmp_path, salt="s")
    for seed, engine in enumerate((other, plain)):
        moved = engine.prefill(words(1), position=90)
        engine.decode([7], [moved], [90], 200, sampling=Sampling(forced_token_ids=(5, 6), seed=seed))
        copied = engine.prefill(words(2), [moved], [90], 130)
        engine.decode([7], [copied, moved], [3, 40], 200, sampling=Sampling(forced_token_ids=(5, 6), seed=seed))
    assert other.stats().restored_from_disk == 1 and other.kv.key(moved_handle(other)).native_offset == 0
    assert (torch.stack(logits_by_seed[0]) - torch.stack(logits_by_seed[1])).abs().max().item() <= 1e-4


def moved_handle(engine: Engine) -> MessageHandle:
    return engine.prefill(words(1))


@pytest.mark.parametrize("harm", HARMS)
def test_attack_a_kept_file_that_was_changed_is_computed_again(
    make_engine: MakeEngine, tmp_path: Path, harm: str, logits_by_seed: Logits
) -> None:
    events = EventList()
    engine, plain = make_engine(persist_dir=tmp_path, salt="s", sink=events), make_engine()
    made, _ = kept_by(engine, tmp_path)
    engine.kv.offload()
    [path] = [path for path in files(tmp_path) if path.stem == made[1].id]
    HARMS[harm](path)
    answer(engine, made, 1)
    answer(plain, chain(plain), 2)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))
    stats = engine.stats()
    assert (stats.restored_from_disk, stats.recomputed, stats.lost) == (2, 1, 1)
    [skipped] = [event for event in events.events if isinstance(event, FileSkipped)]
    assert skipped.path == str(path) and skipped.reason
    assert len(files(tmp_path, ".broken")) == (harm != "gone")
    engine.kv.persist(made)
    engine.kv.flush()
    engine.kv.offload()
    assert engine.kv.tiers(made) == ["disk"] * 3, "it is written again"


def test_a_reader_whose_file_is_bad_waits_for_the_rest(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Several at once, some of which are read and some computed, and a view that grows meanwhile."""
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, bits = kept_by(engine, tmp_path)
    engine.kv.offload()
    for path in files(tmp_path)[:2]:
        path.write_bytes(b"")
    said = engine.decode(
        [Decode([7 + at], made[: at + 1], sampling=Sampling(forced_token_ids=(5, 6))) for at in range(3)]
    )
    assert len(said) == 3 and engine.stats().recomputed + engine.stats().restored_from_disk == 3
    assert all(engine.kv.read(handle).keys.shape == kv.keys.shape for handle, kv in zip(made, bits, strict=True))


def test_nothing_is_kept_without_a_folder_and_none_of_it_without_a_salt(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    plain, bare = make_engine(salt="s"), make_engine(persist_dir=tmp_path)
    plain.kv.persist(chain(plain))
    plain.kv.unpersist(["0" * 32])
    plain.kv.flush()
    assert plain._tenant.persistent_kv is None
    lost = bare.prefill(words(9), lazy=True)
    bare.kv.persist([]), bare.kv.persist([lost]), bare.kv.flush(), bare.kv.unpersist([lost])
    made = chain(bare)
    with pytest.raises(InvalidRequestError, match="salt="):
        bare.kv.persist(made)
    assert bare._tenant.persistent_kv is not None and not bare._tenant.persistent_kv.has(made[0].id)
    salted = bare.tenant("s")
    kept_by(salted, tmp_path)
    assert bare.stats().leases == 4 and bare.kv.tiers(made) == ["device"] * 3


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_a_twin_that_reencodes_text_keeps_none(make_engine: MakeEngine, tmp_path: Path, method: str) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s", method=method)
    engine.kv.persist(chain(engine))
    engine.kv.flush()
    assert files(tmp_path) == []


def test_only_what_has_kv_and_fits_is_written_and_that_once(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path, persist_bytes=60 * TOKEN, salt="s")
    small, large = engine.prefill(words(1, 20)), engine.prefill(words(2, 61))
    lazy, lost = engine.prefill(words(3), lazy=True), engine.prefill(words(4))
    engine.kv.offload([lost])
    engine.kv.persist([small, large, small, lazy, lost])
    engine.kv.flush()
    assert [path.stem for path in files(tmp_path)] == [small.id] and engine.stats().tokens_encoded == 20 + 61 + 24
    [path] = files(tmp_path)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    engine.kv.persist([small])
    engine.kv.flush()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    with pytest.raises(HandleError):
        engine.kv.persist([small.model_copy(update={"id": "0" * 32})])


def test_the_budget_is_of_all_engines_and_the_longest_unused_leaves(make_engine: MakeEngine, tmp_path: Path) -> None:
    engines = [make_engine(persist_dir=tmp_path, persist_bytes=100 * TOKEN, salt="s") for _ in range(2)]
    for number in range(6):
        engine = engines[number % 2]
        engine.kv.persist([engine.prefill(words(number))])
        engine.kv.flush()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 100 * TOKEN and len(files(tmp_path)) == 4
    last = engines[1].prefill(words(5))
    assert engines[0]._tenant.persistent_kv is not None and engines[0]._tenant.persistent_kv.has(last.id)


def test_copies_are_made_of_their_sources_again_and_adapters_are_told_apart(
    make_engine: MakeEngine, tiny: LoadedModel, tiny_path: Path, tmp_path: Path
) -> None:
    adapter = save_mapper(save_adapter(tmp_path / "both", tiny_path), tiny)
    bits: list[HostKV] = []
    for turn in range(2):
        engine = make_engine(persist_dir=tmp_path / "kept", salt="s", adapter=adapter)
        own, base = engine.prefill([Prefill(words(1), adapter=name) for name in ("both", "base")])
        [copy] = engine.branches.map([own])
        assert len({own.id, base.id, copy.id}) == 3
        if turn == 0:
            bits = [engine.kv.read(handle) for handle in (own, base, copy)]
        engine.kv.persist([own, base, copy])
        engine.kv.flush()
        assert {path.stem for path in files(tmp_path / "kept")} == {own.id, base.id}
        engine.kv.offload()
        assert engine.kv.tiers([own, base, copy]) == ["disk", "disk", "lineage"]
        assert all(same(engine.kv.read(h), kv) for h, kv in zip((own, base, copy), bits, strict=True))
        assert engine.stats().tokens_encoded == (48 if turn == 0 else 0)


@pytest.mark.parametrize("trouble", ["a file in its place", "a full disk"])
def test_what_cannot_be_written_is_told_and_nothing_else_breaks(
    make_engine: MakeEngine, tmp_path: Path, trouble: str
) -> None:
    events = EventList()
    folder = tmp_path / "kept"
    if trouble == "a file in its place":
        folder.write_text("no folder")
    engine = make_engine(persist_dir=folder, salt="s", sink=events)
    made = chain(engine)

    def fails() -> None:
        for handle in made:
            engine.kv.persist([handle])
        with pytest.raises(OSError):
            engine.kv.flush()

    if trouble == "a full disk":
        with full_disk(1000):
            fails()
    else:
        fails()
    engine.kv.flush()
    [told] = [event for event in events.events if isinstance(event, CacheWriteFailed)]
    assert told.path.startswith(str(folder)) and told.reason
    assert engine._core.held_bytes == 0 and files(tmp_path) == files(tmp_path, ".partial") == []
    answer(engine, made, 1)
    folder.unlink() if folder.is_file() else None
    kept_by(engine, folder)


def test_what_fails_is_told_once_and_is_in_nobodys_way(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, read, errors = chain(engine), WantedKV.read, [CapacityError("no memory"), OSError("no room")]

    def fails(wanted: WantedKV) -> tuple[KVKey, HostKV]:
        if errors:
            raise errors.pop(0)
        return read(wanted)

    monkeypatch.setattr(WantedKV, "read", fails)
    engine.kv.persist(made)
    with pytest.raises(OSError, match="no room"):  # of several failures, that of a file
        engine.kv.flush()
    engine.kv.flush()
    assert [path.stem for path in files(tmp_path)] == [made[2].id] and engine._core.held_bytes == 0
    errors.append(KeyError("ours"))
    engine.kv.persist(made[:1])
    with pytest.raises(KeyError):
        engine.kv.flush()


def test_a_sink_may_wait_for_what_is_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    """On the writing thread: that returns at once, since nothing can go on meanwhile."""
    engines: list[Engine] = []
    (tmp_path / "kept").write_text("no folder")

    def sink(event: Any) -> None:
        if isinstance(event, CacheWriteFailed):
            engines[0].kv.flush()

    engines.append(make_engine(persist_dir=tmp_path / "kept", salt="s", sink=sink))
    engines[0].kv.persist(chain(engines[0]))
    with pytest.raises(OSError):
        engines[0].kv.flush()


def test_without_a_thread_nothing_stays_held(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made = chain(engine)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        engine.kv.persist(made)
    assert engine._core.held_bytes == 0
    with pytest.raises(RuntimeError, match="new thread"):
        engine.kv.flush()
    engine.kv.persist(made)
    engine.kv.flush()
    assert len(files(tmp_path)) == 3


def test_a_tenant_that_writes_nothing_takes_no_thread(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    for turn in range(2):
        kept_by(engine, tmp_path)
        for thread in threading.enumerate():
            if thread.name.startswith("choreo-write"):
                thread.join(20)
                assert not thread.is_alive(), turn
        engine.kv.unpersist([path.stem for path in files(tmp_path)])


def test_what_outlives_the_main_thread_writes_too(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors accept nothing then, while other threads still run."""
    engine = make_engine(persist_dir=tmp_path, salt="s")
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.thread._shutdown", True)
        kept_by(engine, tmp_path)


def test_a_sink_that_raises_leaks_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    def sink(event: Any) -> None:
        if isinstance(event, CacheWriteFailed):
            raise RuntimeError("the sink fails")

    (tmp_path / "kept").write_text("no folder")
    engine = make_engine(persist_dir=tmp_path / "kept", salt="s", sink=sink)
    made = chain(engine)
    engine.kv.persist(made)
    with pytest.raises(OSError):
        engine.kv.flush()
    for handle in made:
        engine.release(handle)
    assert (engine.stats().messages, engine.stats().kv_bytes, engine._core.held_bytes) == (0, 0, 0)


def test_steps_go_on_while_files_are_written_and_what_is_to_be_written_stays(
    make_engine: MakeEngine, tmp_path: Path, gate: Gate
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made = chain(engine)
    engine.kv.persist(made)
    assert gate.inside.wait(60)
    answer(engine, made, 1)
    for handle in made:
        engine.release(handle)
    engine.kv.offload()
    assert engine.stats().messages == 0 and engine._core.held_bytes == 72 * TOKEN
    gate.open.set()
    engine.kv.flush()
    assert len(files(tmp_path)) == 3 and engine.stats().recomputed == 0
    assert (engine.stats().kv_bytes, engine.stats().host_bytes, engine._core.held_bytes) == (0, 0, 0)


def test_what_waits_to_be_written_is_held_within_bounds(
    make_engine: MakeEngine, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "_HELD_BYTES", 50 * TOKEN)
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made = [engine.prefill(words(number)) for number in range(5)]
    engine.kv.persist(made)
    assert gate.inside.wait(60)
    engine.kv.offload()
    assert engine.stats().host_bytes == engine._core.held_bytes == 48 * TOKEN
    gate.open.set()
    engine.kv.flush()
    assert len(files(tmp_path)) == 5 and engine.stats().recomputed == 3, "the others are computed for it"
    assert engine._core.held_bytes == 0
    engine.check()


def test_what_is_in_the_host_or_a_file_is_copied_from_there(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The pool has room for nobody else's sake."""
    engine = make_engine(persist_dir=tmp_path / "kept", disk=tmp_path / "own", host_bytes=30 * TOKEN, salt="s")
    made = chain(engine)
    engine.kv.offload()
    while sorted(map(str, engine.kv.tiers(made))) != ["disk", "disk", "host"]:
        pass
    engine.kv.persist(made)
    engine.kv.flush()
    assert len(files(tmp_path / "kept")) == 3 and engine.stats().kv_bytes == 0
    assert engine.stats().restored_from_host == engine.stats().restored_from_disk == 0


@pytest.mark.parametrize("end", ["the engine", "a tenancy", "an engine that nobody holds"])
def test_ending_writes_what_is_to_be_kept_first(tiny: LoadedModel, tmp_path: Path, gate: Gate, end: str) -> None:
    engine = Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22, persist_dir=tmp_path), salt="s")
    keeping = engine.tenant("t") if end == "a tenancy" else engine
    keeping.kv.persist(chain(keeping))
    assert gate.inside.wait(60)
    if end == "an engine that nobody holds":
        core = weakref.ref(engine._core)
        del engine, keeping
        gate.open.set()
        for thread in threading.enumerate():
            if thread.name == "choreo-write":
                thread.join(60)
        gc.collect()
        assert core() is None and len(files(tmp_path)) == 3
        return
    closing = threading.Thread(target=keeping.close)
    flushing = threading.Thread(target=keeping.kv.flush)
    for thread in (closing, flushing):
        thread.start()
    closing.join(0.2)
    assert closing.is_alive() and flushing.is_alive(), "they wait"
    gate.open.set()
    for thread in (closing, flushing):
        thread.join(60)
        assert not thread.is_alive()
    assert len(files(tmp_path)) == 3
    with pytest.raises(EngineClosedError):
        keeping.kv.persist(chain(keeping))
    engine.close()
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22, persist_dir=tmp_path), salt="s") as again:
        theirs = again.tenant("t") if end == "a tenancy" else again
        assert theirs.kv.tiers(chain(theirs)) == ["disk"] * 3


def test_closing_where_nothing_can_be_written_raises_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no folder")
    engine = make_engine(persist_dir=tmp_path / "kept", salt="s")
    engine.kv.persist(chain(engine))
    engine.close()


def test_closing_on_the_engines_own_thread_does_not_wait_for_it(
    make_engine: MakeEngine, tmp_path: Path, gate: Gate
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, errors = chain(engine), list[BaseException]()
    engine.kv.persist(made)
    assert gate.inside.wait(60)

    def watch(logits: torch.Tensor) -> None:
        try:
            with pytest.raises(InvalidRequestError, match="own thread"):
                engine.kv.flush()
            engine.close()
        except BaseException as error:
            errors.append(error)

    with pytest.raises(EngineClosedError):
        engine.decode([Decode([7], made, sampling=Sampling(max_tokens=4, stop_tokens=()), logits_callback=watch)])
    assert not errors
    gate.open.set()


def test_what_is_discarded_is_gone_also_if_it_was_to_be_written(
    make_engine: MakeEngine, tmp_path: Path, gate: Gate
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made = chain(engine)
    kept = engine._tenant.persistent_kv
    assert kept is not None
    engine.kv.persist(made)
    assert gate.inside.wait(60)
    kept.unpersist([handle.id for handle in made[:2]])
    gate.open.set()
    kept.flush()
    assert [kept.has(handle.id) for handle in made] == [False, False, True]
    engine.kv.offload()
    assert engine.kv.tiers(made) == ["lineage", "lineage", "disk"]
    engine.kv.unpersist([made[2], "0" * 32])
    assert files(tmp_path) == [] and engine.kv.tiers(made) == ["lineage"] * 3
    answer(engine, made, 1)
    assert engine.stats().recomputed == 3
    engine.kv.persist(made)
    engine.kv.flush()
    assert len(files(tmp_path)) == 3, "asked again, it is written again"


def test_what_cannot_be_removed_is_not_said_to_be_gone(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, _ = kept_by(engine, tmp_path)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{path} is on a disk that is only read")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match=f"1 of 1 files in .* such as '{made[0].id}"):
            engine.kv.unpersist(made[:1])
    with pytest.raises(PermissionError, match="only read"):
        engine.kv.flush()
    assert len(files(tmp_path)) == 3 and engine.kv.tiers(made[:1]) == ["device"]
    engine.kv.offload()
    assert engine.kv.tiers(made) == ["disk"] * 3, "it is there, and read"
    engine.kv.unpersist(made)
    assert files(tmp_path) == []


def test_what_was_read_from_a_file_that_is_discarded_stays_in_memory(make_engine: MakeEngine, tmp_path: Path) -> None:
    kept_by(make_engine(persist_dir=tmp_path, salt="s"), tmp_path)
    engine = make_engine(persist_dir=tmp_path, salt="s", host_bytes=1 << 20)
    made = chain(engine)
    engine.kv.prefetch(made)
    engine.kv.unpersist(made)
    engine.kv.offload()
    assert engine.kv.tiers(made) == ["host"] * 3
    engine.kv.prefetch(made)
    assert (engine.stats().restored_from_host, engine.stats().recomputed, files(tmp_path)) == (3, 0, [])


def test_what_is_being_read_may_be_discarded(make_engine: MakeEngine, tmp_path: Path, monkeypatch: Any) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    made, bits = kept_by(engine, tmp_path)
    engine.kv.offload()
    load, inside, go_on = KVStore.load, threading.Event(), threading.Event()

    def late(*told: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return load(*told)

    monkeypatch.setattr(KVStore, "load", late)
    reading = threading.Thread(target=answer, args=(engine, made, 1))
    reading.start()
    assert inside.wait(60)
    engine.kv.unpersist(made)
    go_on.set()
    reading.join(60)
    assert not reading.is_alive() and engine.stats().recomputed == 3 and len(bits) == 3


def test_a_tenancy_that_ends_while_its_files_are_read(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path, salt="s")
    tenant = engine.tenant("t")
    made, _ = kept_by(tenant, tmp_path)
    tenant.kv.offload()
    tenant.close()
    again = engine.tenant("t")
    assert chain(again) == made and again.kv.tiers(made) == ["disk"] * 3
    assert engine.kv.tiers([made[0]]) == [None] and engine.kv.tiers(chain(engine)) == ["device"] * 3
    answer(again, made, 1)
    assert again.stats().restored_from_disk == 3


def test_what_another_process_wrote_is_read_once_it_is_asked_for(make_engine: MakeEngine, tmp_path: Path) -> None:
    mine, theirs = (make_engine(persist_dir=tmp_path, salt="s") for _ in range(2))
    made, bits = kept_by(theirs, tmp_path)
    kept = mine._tenant.persistent_kv
    assert (
        kept is not None
        and kept.store is not None
        and not kept.store.knows(made[0].id)
        and all(kept.has(handle.id) for handle in made)
    )
    assert chain(mine) == made and mine.kv.tiers(made) == ["disk"] * 3
    assert all(same(mine.kv.read(handle), kv) for handle, kv in zip(made, bits, strict=True))
    assert mine.stats().tokens_encoded == 0


def test_a_message_that_is_computed_already_is_not_read_as_well(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Its file is found while somebody has it computed: nobody gets in the other's way."""
    engine = make_engine(persist_dir=tmp_path, salt="s", max_batched_tokens=4)
    theirs = make_engine(persist_dir=tmp_path, salt="s")
    made = chain(engine)
    engine.kv.offload()
    kept_by(theirs, tmp_path)
    answers: list[MessageHandle] = []
    call = Decode([7], made, sampling=Sampling(forced_token_ids=(5, 6, 7)))
    threads = [threading.Thread(target=lambda: answers.extend(engine.decode([call]))) for _ in range(4)]
    kept = engine._tenant.persistent_kv
    assert kept is not None
    for thread in threads:
        thread.start()
        for handle in made:
            kept.has(handle.id)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(answers) == 4
    engine.check()


OTHER_PROCESS = """
import json, sys
import torch
from choreo_agents import Engine, Memory
torch.set_num_threads(1)
with Engine.load(sys.argv[1], memory=Memory(kv_budget_bytes=1 << 23, persist_dir=sys.argv[2]), salt="s") as engine:
    print("ready", flush=True)
    sys.stdin.readline()
    made = [engine.prefill(tokens) for tokens in json.loads(sys.argv[3])]
    for handle in made:
        engine.kv.persist([handle])
    sums = [engine.kv.read(handle).keys.double().sum().item() for handle in made]
print(json.dumps([engine.stats().tokens_encoded, sums]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_keep_the_same_messages_at_once(make_engine: MakeEngine, tiny_path: Path, tmp_path: Path) -> None:
    texts = [words(number) for number in range(20)]
    command = [sys.executable, "-c", OTHER_PROCESS, str(tiny_path), str(tmp_path), json.dumps(texts)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    (_, one), (_, other) = (json.loads(process.communicate(timeout=300)[0]) for process in processes)
    assert one == other and len(files(tmp_path)) == 20 and not files(tmp_path, ".partial")
    engine = make_engine(persist_dir=tmp_path, salt="s")
    assert [engine.kv.read(engine.prefill(text)).keys.double().sum().item() for text in texts] == one
    assert engine.stats().tokens_encoded == 0


def test_attack_a_folder_that_others_could_exchange_keeps_nothing(
    make_engine: MakeEngine, tmp_path: Path, tiny: LoadedModel
) -> None:
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "place"
    place.mkdir()
    (place / tiny.adapter.fingerprint).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequestError, match="use a folder of your own"):
        make_engine(persist_dir=place, salt="s")


def test_attack_a_kept_file_of_another_tenant_is_not_believed(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It bears the other's seal: nothing of what it says is taken."""
    engine = make_engine(persist_dir=tmp_path, salt="s")
    other = engine.tenant("other's")
    mine, theirs = engine.prefill(words(1)), other.prefill(words(1))
    for each, handle in ((engine, mine), (other, theirs)):
        each.kv.persist([handle])
        each.kv.flush()
    paths: dict[str, Path] = {path.stem: path for path in files(tmp_path)}
    paths[mine.id].write_bytes(paths[theirs.id].read_bytes())
    engine.kv.offload()
    answer(engine, [mine], 1)
    assert (engine.stats().recomputed, engine.stats().restored_from_disk) == (1, 0)
