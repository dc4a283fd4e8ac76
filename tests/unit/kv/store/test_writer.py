"""Who writes files in the background: nobody waits for ever, and nothing stays held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from choreo_agents.errors import CapacityError, EngineClosedError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store import KVKey, KVStore, KVWriter
from choreo_agents.kv.store.files import LastingPlace
from choreo_agents.kv.tiers import HostKV

GEOMETRY = KVGeometry(1, 1, 8, torch.float32)


class Held:
    """KV of one token that is held until it is released."""

    def __init__(self, name: str, before: Callable[[], object] = lambda: None, nbytes: int = 64) -> None:
        self.id = name
        self.nbytes = nbytes
        self.reads = self.released = 0
        self._before = before

    def read(self) -> tuple[KVKey, HostKV]:
        self.reads += 1
        self._before()
        return KVKey(self.id, "m", (5,), (), 0), HostKV(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8))

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore(LastingPlace(tmp_path, "place"), GEOMETRY, b"key", 1 << 20)


def fail(error: BaseException) -> Callable[[], None]:
    def raising() -> None:
        raise error

    return raising


def test_all_is_written_and_released_and_the_thread_ends(store: KVStore) -> None:
    writer, held = KVWriter(store), [Held(name) for name in "abc"]
    writer.write(held)
    writer.write([again := Held("a"), large := Held("d", nbytes=2 << 20)])
    writer.flush()
    assert [store.has(name) for name in "abcd"] == [True, True, True, False]
    assert [each.released for each in (*held, again, large)] == [1] * 5
    assert (again.reads, large.reads) == (0, 0), "it has a file; it never can"
    for thread in threading.enumerate():
        if thread.name == "choreo-write":
            thread.join(20)
    assert writer._thread is None
    writer.write([Held("e")])
    writer.flush()
    assert store.has("e"), "there is another when there is something to do again"


@pytest.mark.parametrize("at_once", [False, True])
def test_who_waits_in_flush_is_not_forgotten_by_closing(store: KVStore, at_once: bool) -> None:
    gate, writer = threading.Event(), KVWriter(store)
    writer.write([Held("a", lambda: gate.wait(60)), Held("b")])
    ended: list[str] = []
    waiting = [
        threading.Thread(target=lambda: (writer.flush(), ended.append("flush"))),
        threading.Thread(target=lambda: (writer.close(wait=not at_once), ended.append("close"))),
    ]
    for thread in waiting:
        thread.start()
    if at_once:
        waiting[1].join(20)
        assert ended == ["close"]
    late = Held("c")
    while not writer._closed:
        pass
    with pytest.raises(EngineClosedError):
        writer.write([late])
    assert late.released == 1 and (late.reads, store.has("c")) == (0, False)
    gate.set()
    for thread in waiting:
        thread.join(20)
    assert sorted(ended) == ["close", "flush"] and store.has("a") and store.has("b")


@pytest.mark.parametrize(
    "error", [OSError("no room"), CapacityError("no memory"), KeyError("ours"), SystemExit()], ids=repr
)
def test_what_fails_is_told_once_and_is_in_nobodys_way(store: KVStore, error: BaseException) -> None:
    writer = KVWriter(store)
    held = [Held("a", fail(error)), Held("b")]
    writer.write(held)
    with pytest.raises(type(error)):
        writer.flush()
    writer.flush()
    assert [each.released for each in held] == [1, 1] and store.has("b") and not store.has("a")


def test_of_several_failures_that_of_a_file_is_told(store: KVStore) -> None:
    writer = KVWriter(store)
    writer.write([Held("a", fail(CapacityError("no memory"))), Held("b", fail(OSError("no room"))), Held("c")])
    with pytest.raises(OSError, match="no room"):
        writer.flush()


def test_a_folder_that_cannot_be_written_is_told_once_until_it_can(store: KVStore, tmp_path: Path) -> None:
    told: list[str] = []

    def tell(path: Path, why: str) -> None:
        told.append(why)
        raise RuntimeError("who is told fails")

    writer, held = KVWriter(store, tell), [Held(name) for name in "abcd"]
    place = tmp_path / "place"
    place.write_text("no folder")
    writer.write(held[:3])
    with pytest.raises(OSError):
        writer.flush()
    assert len(told) == 1
    place.unlink()
    writer.write(held[3:])
    writer.flush()
    assert [each.released for each in held] == [1] * 4 and store.has("d")
    store.drop("d")
    store.folder.rmdir()
    place.write_text("no folder")
    writer.write([Held("e")])
    with pytest.raises(OSError):
        writer.flush()
    assert len(told) == 2


def test_what_cannot_be_released_is_in_nobodys_way(store: KVStore) -> None:
    writer, bad = KVWriter(store), Held("a")
    bad.release = fail(ValueError("released twice"))  # type: ignore[method-assign]
    writer.write([bad, Held("b")])
    with pytest.raises(ValueError, match="twice"):
        writer.flush()
    assert store.has("a") and store.has("b")


def test_what_is_dropped_while_it_is_written_is_gone(store: KVStore) -> None:
    inside, gate, writer = threading.Event(), threading.Event(), KVWriter(store)
    writer.write([Held("a", lambda: (inside.set(), gate.wait(60))), Held("b")])
    assert inside.wait(60)
    writer.drop(["a", "b"])
    gate.set()
    writer.flush()
    assert not store.has("a") and not store.has("b") and list(store.folder.iterdir()) == []


def test_without_a_thread_nothing_stays_held(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, held = KVWriter(store), Held("a")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("can't start new thread"))())
        writer.write([held])
    assert held.released == 1
    with pytest.raises(RuntimeError, match="new thread"):
        writer.flush()


def test_who_is_told_may_wait_for_the_writer(store: KVStore, tmp_path: Path) -> None:
    """On its own thread: that returns at once, since nothing can go on meanwhile."""
    writers: list[KVWriter] = []
    writer = KVWriter(store, lambda path, why: writers[0].wait())
    writers.append(writer)
    (tmp_path / "place").write_text("no folder")
    writer.write([Held("a")])
    with pytest.raises(OSError):
        writer.flush()
