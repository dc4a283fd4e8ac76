"""What `make torture-durable` does at length, in short; and that its reader notices what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore
from support.stored import described, spoiled
from torture.durable import Torture, named
from torture.durable_processes import Process
from torture.durable_reader import Reader, Reported, damage, read_store

from choreo_agents import Engine
from choreo_agents.graph.durable.thread_log import ThreadLog

Record = Callable[[str, object], None]
pytestmark = pytest.mark.timeout(1800)


def require_whole(torture: Torture, record: Record) -> None:
    assert not torture.reader.wrong
    counts = torture.counts
    assert counts["kills within a leg"] and counts["threads ended"] >= 3 and counts["tokens streamed"]
    assert counts["kills with another at work"]
    told = ("messages reported", "messages reported again", "decodes", "legs after another living process's")
    record("counts", f"{torture.progress.kills} kills, " + ", ".join(f"{counts[name]} {name}" for name in told))


@pytest.mark.slow
def test_nothing_that_was_reported_is_lost_with_a_process(tmp_path: Path, record_property: Record) -> None:
    torture = Torture(tmp_path, "sqlite", seed=1)
    torture.run(2)
    assert not torture.reader.wrong
    # It is stopped as well, and goes on.
    torture = Torture(tmp_path, "sqlite", seed=1)
    assert torture.progress.kills == 2 and torture.reader.threads
    torture.run(5)
    require_whole(torture, record_property)


@pytest.mark.slow
def test_nor_of_what_a_server_keeps(tmp_path: Path, postgres: str, record_property: Record) -> None:
    torture = Torture(tmp_path, "postgres", named(postgres), seed=1, cuts=3)
    torture.run(5)
    require_whole(torture, record_property)
    assert torture.counts["cut connections"]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Torture, Process, Process]]:
    """Two on one file, and who hears them."""
    torture = Torture(tmp_path, "sqlite")
    found = torture.start(), torture.start()
    try:
        yield torture, *found
    finally:
        torture.end(found)
    assert not torture.reader.wrong


def test_two_processes_write_one_file_at_once(processes: tuple[Torture, Process, Process]) -> None:
    """Each its own threads: none hears that the file is locked."""
    torture, *both = processes
    for turn in range(4):
        for number, process in enumerate(both):
            torture.begin(process, f"thread-{2 * (turn // 2) + number}", "async")
        torture.hear_all(both)
    assert len(torture.reader.threads) == 4 and torture.counts["legs"] == 8
    assert torture.counts["decodes"] == 4 * 2 * 7, "everything was decoded once"


def test_a_thread_is_taken_over_from_a_process_that_lives(processes: tuple[Torture, Process, Process]) -> None:
    """And taken back: who said its first words learns of what the other has said meanwhile."""
    torture, one, other = processes
    for process in (one, other, one, other):
        torture.begin(process, "thread-0", "async")
        torture.hear_all([process])
    assert torture.progress.ended == ["thread-0"] and torture.counts["decodes"] == 3 * 7


class TestReader:
    def heard(self, *told: dict[str, Any]) -> Reader:
        reader = Reader()
        for each in told:
            reader.hear({"thread": "thread-0", **each}, 0, each.get("answers", frozenset()))
        return reader

    def update(self, words: str, handle: str = "h") -> dict[str, Any]:
        said = {"place": ["ann", 1, 0, 0], "id": "m", "handle": handle, "words": words}
        return {"kind": "update", "node": "ann", "said": [said]}

    def token(self, text: str, name: str = "m") -> dict[str, Any]:
        return {"kind": "token", "at": ["ann", 1, ""], "id": name, "text": text}

    def wrong(self, reader: Reader, words: str = "Hello.", noted: tuple[str, ...] = ("h",)) -> list[str]:
        message = type("Message", (), {"id": "m", "text": words})
        entry = {"author": "ann", "superstep": 1, "branch": 0, "handle": {"id": "h"}, "message_id": "m"}
        reader.look_at_state("thread-0", {"messages": [message], "handles": [entry]}, {*noted})
        return reader.wrong

    def test_all_is_well(self) -> None:
        reader = self.heard(self.token("Hel"), self.token("lo."), self.update("Hello."), self.update("Hello."))
        assert not self.wrong(reader)
        reader.look_at_end("thread-0", {("ann", 1, 0, 0): Reported("h", "Hello.")})
        assert not reader.wrong

    def test_other_words(self) -> None:
        assert "and now" in self.heard(self.update("Hello."), self.update("Hallo.")).wrong[0]
        assert "and now" in self.heard(self.update("Hello."), self.update("Hello.", "other")).wrong[0]
        assert "is Reported" in self.wrong(self.heard(self.update("Hello.")), "Hallo.")[0]
        reader = self.heard(self.update("Hello."))
        reader.look_at_end("thread-0", {("ann", 1, 0, 0): Reported("h", "Hallo.")})
        assert "should be" in reader.wrong[0]

    def test_what_was_streamed_before_a_kill(self) -> None:
        [wrong] = self.wrong(self.heard(self.token("Hal"), self.update("Hello.")))
        assert "['Hal'] were streamed" in wrong
        # Two answers to one call of a node are two messages, though they begin alike.
        [wrong] = self.wrong(self.heard(self.token("H"), self.token("H", "other"), self.update("Hello.")))
        assert "['H', 'H'] were streamed" in wrong

    def test_what_is_not_kept(self) -> None:
        assert "nothing is noted" in self.wrong(self.heard(self.update("Hello.")), noted=())[0]

    def test_what_is_decoded_again(self) -> None:
        again = {"kind": "decoded", "place": ["ann", 1, 0, 0]}
        assert not self.wrong(self.heard(again))
        assert "decoded again" in self.wrong(self.heard(again | {"answers": frozenset({"h"})}))[0]


def test_damage_is_seen(engine: Engine) -> None:
    store = InMemoryStore()
    log = ThreadLog(store, engine, "1")
    for number, parents in ((1, []), (2, [1])):
        asyncio.run(log.write([described(number, parents, [f"call {number}"])]))
    assert not damage(read_store(store, engine), engine)
    first, second = sorted(store.search(log.place), key=lambda item: item.key)
    store.delete(log.place, first.key)
    assert "lacks its parent" in damage(read_store(store, engine), engine)[0]
    store.put(log.place, first.key, first.value)
    store.put(log.place, second.key, spoiled(second.value, tokens=[7]))
    assert any("signature" in each for each in damage(read_store(store, engine), engine))
