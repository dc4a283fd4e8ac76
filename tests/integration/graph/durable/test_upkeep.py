"""A store is read from end to end, and what nobody needs leaves it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import BaseStore, PutOp
from langgraph.store.memory import InMemoryStore
from langgraph.store.postgres import PostgresStore
from support.stored import SALT, TENANT, BreakingStore, keys_of, named, thread_named, writes

from choreo_agents.errors import InvalidRequestError, StoreError
from choreo_agents.graph.durable.beside import opened
from choreo_agents.graph.durable.forgetting import holders_of, leaving_of, notes_of, rows_of
from choreo_agents.graph.durable.upkeep import acheck_store, check_store, compact_store, store_at
from choreo_agents.graph.durable.upkeep.listing import listed

ANN, BOB = thread_named("ann"), thread_named("bob")
CHAIN = {number: (number - 1,) for number in range(2, 10)}
KINDS = ("memory", "sqlite", "postgres")


@contextmanager
def made(kind: str, folder: Path, postgres: str) -> Iterator[BaseStore]:
    """A store, empty."""
    if kind == "memory":
        yield InMemoryStore()
    elif kind == "sqlite":
        yield opened(folder / "states.lineage")
    else:
        with PostgresStore.from_conn_string(postgres) as store:
            store.setup()
            store.conn.execute("DELETE FROM store")  # type: ignore[union-attr]
            yield store


def aged(store: BaseStore, thread: str, by: timedelta) -> None:
    """Let all that a thread has written have been written so long ago."""
    place = ".".join(notes_of(TENANT, thread)) + ".%"
    if isinstance(store, InMemoryStore):
        for space, items in store._data.items():
            for item in items.values() if space[:-1] == notes_of(TENANT, thread) else ():
                item.updated_at -= by
    elif isinstance(store, PostgresStore):
        store.conn.execute("UPDATE store SET updated_at = updated_at - %s WHERE prefix LIKE %s", (by, place))  # type: ignore[union-attr]
    else:
        at = f"{datetime.now(UTC) - by:%Y-%m-%d %H:%M:%S}"
        store.conn.execute("UPDATE store SET updated_at = ? WHERE prefix LIKE ?", (at, place))  # type: ignore[attr-defined]


def found_in(store: BaseStore, *salts: str) -> list[tuple[str, str, str]]:
    report = check_store(store, salts=salts)
    assert sum(report.counts().values()) == len(report.findings)
    return [(each.what, each.id, each.thread) for each in report.findings]


def spoilt() -> list[PutOp]:
    """One of everything that can be wrong, each with a message of its own; 1 to 3 are whole."""
    ops = writes("ann", [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13], {2: (1,), 3: (2,), 9: (99,)})
    row = {op.key: op for op in ops if op.namespace[1] == "rows"}
    note = {op.namespace[-1]: op for op in ops if op.namespace[1] == "notes"}
    rows = rows_of(TENANT)
    return [
        *ops,
        PutOp(rows, named(4), {**row[named(4)].value, "tokens": []}),  # type: ignore[dict-item]
        PutOp(
            note[named(6)].namespace, note[named(6)].key, {**note[named(6)].value, "authors": [["x"]], "foreign": [1]}
        ),  # type: ignore[dict-item]
        PutOp(rows, named(7), {**row[named(7)].value, "v": 99}),  # type: ignore[dict-item]
        PutOp(("choreo", "elsewhere"), "x", {}),
        PutOp(note[named(8)].namespace, note[named(8)].key, {**note[named(9)].value}),  # type: ignore[dict-item]
        PutOp(rows, named(10), None),
        PutOp(holders_of(TENANT, named(11)), ANN, None),
        PutOp(note[named(12)].namespace, note[named(12)].key, None),
        PutOp(leaving_of(TENANT), named(13), row[named(13)].value),
        PutOp(rows, named(13), None),
    ]


SPOILT = [
    ("damaged row", named(4), ""),
    ("damaged note", named(6), ANN),
    ("damaged note", named(8), ANN),
    ("another format", named(7), ""),
    ("unknown entry", "x", ""),
    ("missing parent", named(9), ""),
    ("note without row", named(10), ANN),
    ("note without holder", named(11), ANN),
    ("holder without row", named(10), ANN),
    ("holder without note", named(12), ANN),
    ("row without holder", named(11), ""),
    ("row on its way out", named(13), ""),
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_thing_that_is_wrong_is_named(kind: str, tmp_path: Path, postgres: str) -> None:
    with made(kind, tmp_path, postgres) as store:
        store.batch(writes("ann", range(1, 10), CHAIN) + writes("bob", range(1, 5), CHAIN))
        report = check_store(store, salts=[SALT])
        assert (report.tenants, report.threads, report.rows, report.notes, report.holders) == (1, 2, 9, 13, 13)
        assert report.sealed == 9 + 13 and not report.findings
        assert check_store(store).sealed == 0
        store.batch([PutOp(op.namespace, op.key, None) for op in writes("bob", range(1, 5))])
        store.batch([PutOp(op.namespace, op.key, None) for op in writes("ann", range(1, 10))])
        store.batch(spoilt())
        assert found_in(store) == SPOILT


def test_what_the_store_itself_cannot_read_is_named(tmp_path: Path) -> None:
    store: Any = opened(tmp_path / "states.lineage")
    store.batch(writes("ann", [1, 2, 3]))
    for number, value in ((1, "{"), (2, "[]"), (3, "7")):
        told = value, named(number)
        store.conn.execute("UPDATE store SET value = ? WHERE key = ? AND prefix LIKE '%.rows.%'", told)
    assert found_in(store) == [("damaged row", named(number), "") for number in (1, 2, 3)]


def test_seals_are_read_with_a_salt_alone() -> None:
    store = InMemoryStore()
    store.batch(writes("ann", [1, 2]))
    row = store.get(rows_of(TENANT), named(1))
    assert row is not None
    store.put(rows_of(TENANT), named(1), {**row.value, "tokens": [9]})
    assert found_in(store) == []
    assert found_in(store, SALT, "another") == [("damaged row", named(1), "")]


@pytest.mark.parametrize("kind", KINDS)
async def test_all_is_listed_however_it_was_written(kind: str, tmp_path: Path, postgres: str) -> None:
    """More than pages have room for, all of it at one time."""
    with made(kind, tmp_path, postgres) as store:
        store.batch(writes("ann", range(1500)))
        store.put(("choreo2", "rows", "x"), "y", {})
        names = [(*each.namespace, each.key) async for page in listed(store) for each in page]
        assert len(names) == len({*names}) == 3 * 1500
        report = await acheck_store(store)
        assert (report.rows, report.notes, report.holders, report.findings) == (1500, 1500, 1500, ())


class Written(BreakingStore):
    """Others write to it whenever it is asked for more than a few things."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Sequence[PutOp]] = []

    def batch(self, ops: Any) -> list[Any]:
        listed_ops = list(ops)
        answers = super().batch(listed_ops)
        if self.pending and not any(isinstance(op, PutOp) for op in listed_ops):
            self.inner.batch(self.pending.pop(0))
        return answers


def test_what_is_written_while_it_is_read_is_no_finding_and_is_not_deleted() -> None:
    store = Written()
    store.inner.batch(writes("ann", range(1, 5), CHAIN))
    store.pending = [writes("bob", range(each, each + 3), CHAIN) for each in range(4, 12)]
    assert found_in(store) == []
    assert not [found for found in found_in(store) if found[0] != "missing parent"]
    store.pending = [writes("cleo", range(each, each + 3), CHAIN) for each in range(20, 60, 3)]
    before = {*keys_of(store.inner)}
    done = compact_store(store, older_than=timedelta(hours=1))
    assert (done.threads, done.rows, done.holders) == ((), 0, 0)
    assert before < {*keys_of(store.inner)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_needs_leaves(kind: str, tmp_path: Path, postgres: str) -> None:
    with made(kind, tmp_path, postgres) as store:
        store.batch(spoilt())
        whole = writes("ann", [1, 2, 3], {2: (1,), 3: (2,)})
        rehearsed = compact_store(store, dry_run=True)
        assert found_in(store) == SPOILT
        done = compact_store(store)
        assert (rehearsed.threads, rehearsed.rows, rehearsed.notes, rehearsed.holders) == ((), 2, 0, 1)
        assert (done.threads, done.rows, done.notes, done.holders) == ((), 2, 0, 1)
        gone = {("row without holder", named(11), ""), ("holder without note", named(12), ANN)}
        gone |= {("row on its way out", named(13), "")}
        left = {*found_in(store)}
        # Of what was half forgotten notes are left: forgetting the thread is for the one who knows it.
        assert left == {*SPOILT} - gone | {("note without row", named(11), ANN)}
        assert all(store.get(op.namespace, op.key) is not None for op in whole)


@pytest.mark.parametrize("kind", KINDS)
def test_old_threads_leave_with_what_only_they_need(kind: str, tmp_path: Path, postgres: str) -> None:
    with made(kind, tmp_path, postgres) as store:
        store.batch(writes("ann", range(1, 7), CHAIN))
        store.batch(writes("bob", range(1, 4), CHAIN))
        aged(store, ANN, timedelta(days=31))
        aged(store, BOB, timedelta(days=29))
        rehearsed = compact_store(store, older_than=timedelta(days=30), dry_run=True)
        assert len(keys_of(store, "choreo", "notes")) == 9
        done = compact_store(store, older_than=timedelta(days=30))
        for each in (rehearsed, done):
            assert (each.threads, each.rows, each.notes, each.holders) == (((TENANT, ANN),), 3, 6, 6)
        assert rehearsed.is_rehearsal and not done.is_rehearsal
        assert found_in(store, SALT) == [] and len(keys_of(store, "choreo")) == 9
        assert compact_store(store, older_than=timedelta(days=30)).threads == ()


def test_what_another_release_has_written_stays() -> None:
    store = InMemoryStore()
    store.batch(writes("ann", [1]))
    [note] = store.search(notes_of(TENANT, ANN))
    store.put(note.namespace, note.key, {**note.value, "v": 2})
    store.put(rows_of(TENANT), named(2), {"v": 2})
    aged(store, ANN, timedelta(days=31))
    before = keys_of(store)
    assert compact_store(store, older_than=timedelta(days=30)).threads == () and keys_of(store) == before


def test_a_file_gets_as_small_as_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "states.lineage"
    store = opened(path)
    store.batch(writes("ann", range(3000)))
    store.batch(writes("bob", [1]))
    aged(store, ANN, timedelta(days=31))
    rehearsed = compact_store(store, older_than=timedelta(days=30), dry_run=True)
    done = compact_store(store, older_than=timedelta(days=30))
    assert rehearsed.bytes_before and rehearsed.bytes_after is None
    assert done.bytes_before and done.bytes_after and 10 * done.bytes_after < done.bytes_before
    assert done.bytes_after == sum(each.stat().st_size for each in tmp_path.iterdir() if each.suffix != ".lineage-shm")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "states.lineage")
    store.batch(writes("ann", [1]))
    monkeypatch.setattr("choreo_agents.graph.durable.upkeep.compacting._BUSY_S", 0.01)
    other = sqlite3.connect(tmp_path / "states.lineage", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"as large as before.*locked"):
        compact_store(store)
    other.execute("ROLLBACK")
    assert compact_store(store).rows == 0


def test_a_store_is_found_by_its_file_or_its_checkpointers(tmp_path: Path, postgres: str) -> None:
    states = tmp_path / "states"
    with sqlite3.connect(states) as connection:
        connection.execute("CREATE TABLE checkpoints (a)")
    for place, why in ((tmp_path / "none", "is no file"), (states, "has no store of lineage")):
        with pytest.raises(InvalidRequestError, match=why), store_at(str(place)):
            pass
    assert [*tmp_path.iterdir()] == [states], "nothing is made by looking"
    opened(tmp_path / "states.lineage").batch(writes("ann", [1]))
    for place in (states, tmp_path / "states.lineage"):
        with store_at(str(place)) as store:
            assert check_store(store).rows == 1
    (tmp_path / "no").write_text("no file of SQLite's")
    with pytest.raises(StoreError, match="not a database"), store_at(str(tmp_path / "no")):
        pass
    with pytest.raises(InvalidRequestError, match="not at 'mysql'"), store_at("mysql://x"):
        pass
    with store_at(postgres) as store:
        assert isinstance(store, PostgresStore)
    with pytest.raises(StoreError, match="cannot be read") as failed, store_at("postgresql://a:secret@127.0.0.1:1/b"):
        pass
    assert "secret" not in str(failed.value)


def test_no_age_is_no_age() -> None:
    with pytest.raises(InvalidRequestError, match="longer than no time"):
        compact_store(InMemoryStore(), older_than=timedelta(0))
