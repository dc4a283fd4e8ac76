"""Every store of LangGraph's keeps lineage, and a store that fails loses nothing that was reported."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.base import BaseStore, Op, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore
from langgraph.store.postgres import PostgresStore
from langgraph.store.postgres.aio import AsyncPostgresStore
from langgraph.store.sqlite import SqliteStore
from langgraph.store.sqlite.aio import AsyncSqliteStore
from support.graphs import FREE, agent, said

from choreo_agents import END, START, ChoreoGraph
from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.thread_log import ROOT, run_store_ops

ASKED: Any = {"messages": [("user", "What does Ann have?")]}


def graph() -> ChoreoGraph:
    graph = ChoreoGraph(system="Agents read their notes.")
    for name in ("ann", "bob", "cleo"):
        graph.add_node(agent(name, prompt="Say it.", sampling=FREE))
    graph.add_edge(START, "ann").add_edge(START, "bob").add_edge(["ann", "bob"], "cleo")
    return graph.add_edge("cleo", END)


def thread() -> Any:
    return {"configurable": {"thread_id": uuid4().hex}}


SYNC = ("memory", "sqlite", "postgres")
ASYNC = ("async sqlite", "async postgres", "sqlite", "memory")


@contextmanager
def opened(kind: str, folder: Path, postgres: str) -> Iterator[BaseStore]:
    if kind == "memory":
        yield InMemoryStore()
    elif kind == "sqlite":
        with SqliteStore.from_conn_string(str(folder / "store")) as sqlite:
            yield sqlite
    else:
        with PostgresStore.from_conn_string(postgres) as store:
            store.setup()
            yield store


@asynccontextmanager
async def aopened(kind: str, folder: Path, postgres: str) -> AsyncIterator[BaseStore]:
    if kind == "async sqlite":
        async with AsyncSqliteStore.from_conn_string(str(folder / "store")) as sqlite:
            await sqlite.setup()
            yield sqlite
    elif kind == "async postgres":
        async with AsyncPostgresStore.from_conn_string(postgres) as store:
            await store.setup()
            yield store
    else:
        with opened(kind, folder, postgres) as found:
            yield found


@pytest.mark.parametrize("kind", SYNC)
def test_a_run_goes_on_from_it(kind: str, make_engine: MakeEngine, tmp_path: Path, postgres: str) -> None:
    own, saver = thread(), InMemorySaver()
    with opened(kind, tmp_path, postgres) as store:
        expected = said(engine := make_engine(salt="s"), graph().compile(saver, engine=engine).invoke(ASKED, thread()))
        app = graph().compile(saver, engine=make_engine(salt="s"), interrupt_before=["cleo"], lineage=store)
        app.invoke(ASKED, own)
        assert len(store.search((ROOT,), limit=99)) <= 2, "one entry for each node at most"
        state = graph().compile(saver, engine=(engine := make_engine(salt="s")), lineage=store).invoke(None, own)
        assert said(engine, state) == expected
        graph().compile(saver, engine=make_engine(salt="s"), lineage=store).delete_thread(
            own["configurable"]["thread_id"]
        )
        assert not store.search(("choreo",), limit=1000)


@pytest.mark.parametrize("kind", ASYNC)
async def test_so_it_does_in_an_event_loop(kind: str, make_engine: MakeEngine, tmp_path: Path, postgres: str) -> None:
    own, saver = thread(), InMemorySaver()
    async with aopened(kind, tmp_path, postgres) as store:
        engine = make_engine(salt="s")
        expected = said(engine, await graph().compile(saver, engine=engine).ainvoke(ASKED, thread()))
        app = graph().compile(saver, engine=make_engine(salt="s"), interrupt_before=["cleo"], lineage=store)
        await app.ainvoke(ASKED, own)
        app = graph().compile(saver, engine=(engine := make_engine(salt="s")), lineage=store)
        assert said(engine, await app.ainvoke(None, own)) == expected
        # A sync caller on a thread of its own is served by the same store.
        first, own = own, thread()
        assert said(engine, await asyncio.to_thread(app.invoke, ASKED, own)) == expected
        await app.adelete_thread(own["configurable"]["thread_id"])
        await app.adelete_thread(first["configurable"]["thread_id"])
        assert await run_store_ops(store, [SearchOp(("choreo",), limit=1000)]) == [[]]


class Faulty(BaseStore):
    """Fails, or waits, where it is told to."""

    def __init__(self) -> None:
        self.inner, self.fails, self.batches = InMemoryStore(), False, list[list[Op]]()
        self.may_write = threading.Event()
        self.may_write.set()

    def batch(self, ops: Iterable[Op]) -> list[Any]:
        listed = list(ops)
        if any(isinstance(op, PutOp) for op in listed):
            assert self.may_write.wait(30)
            if self.fails:
                raise ConnectionError("nobody answers")
            self.batches.append(listed)
        return self.inner.batch(listed)

    async def abatch(self, ops: Iterable[Op]) -> list[Any]:
        raise NotImplementedError("sync only")


def test_what_cannot_be_written_is_not_reported(make_engine: MakeEngine) -> None:
    """The node fails, and goes on with what it had said when the store works: nothing is decoded twice."""
    engine, store, own = make_engine(salt="s"), Faulty(), thread()
    app = graph().compile(InMemorySaver(), engine=engine, lineage=store)
    store.fails = True
    with pytest.raises(StoreError, match=r"nobody answers.*nothing reported before is lost"):
        app.invoke(ASKED, own)
    assert not (app.get_state(own).values.get("handles") or [])
    store.fails, encoded = False, engine.stats().tokens_encoded
    app.get_state(own)
    state = app.invoke(None, own)
    again = graph().compile(InMemorySaver(), engine=(fresh := make_engine(salt="s"))).invoke(ASKED, thread())
    assert said(engine, state) == said(fresh, again)
    assert engine.stats().tokens_encoded < encoded + fresh.stats().tokens_encoded / 2, "only Cleo had not spoken"


async def test_a_slow_store_holds_up_nobody_else(make_engine: MakeEngine) -> None:
    engine, store = make_engine(salt="s"), Faulty()
    app = graph().compile(InMemorySaver(), engine=engine, lineage=store)
    store.may_write.clear()
    waiting = asyncio.create_task(app.ainvoke(ASKED, thread()))
    free = await graph().compile(InMemorySaver(), engine=engine).ainvoke(ASKED, thread())
    assert len(free["handles"]) == 4 and not waiting.done() and not store.batches
    store.may_write.set()
    assert len((await waiting)["handles"]) == 4


@contextmanager
def beside(folder: Path) -> Iterator[Any]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    with SqliteSaver.from_conn_string(str(folder / "states")) as saver:
        yield saver


def test_a_full_file_stops_the_run_and_not_the_store(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, own = make_engine(salt="s"), thread()
    with beside(tmp_path) as saver:
        app = graph().compile(saver, engine=engine)
        app.invoke(ASKED, thread())
        from choreo_agents.graph.durable.finding import open_store as file_store

        connection = file_store(tmp_path / "states.lineage").conn  # type: ignore[attr-defined]
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreError, match="full"):
            app.invoke({"messages": [("user", "Ann has 3 red kites. " * 40)]}, own)
        connection.execute("PRAGMA max_page_count=1000000")
        assert len(app.invoke(None, own)["handles"]) == 4


def test_a_folder_that_cannot_be_written_is_told(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "states.lineage").mkdir()
    with beside(tmp_path) as saver:
        app = graph().compile(saver, engine=make_engine(salt="s"))
        with pytest.raises(StoreError, match=r"cannot store the lineage of runs in .*lineage=False"):
            app.invoke(ASKED, thread())


class KilledError(BaseException):
    """Stands for a process that is gone."""


class Dying(sqlite3.Connection):
    """Dies between two steps that make a store's tables."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("INSERT INTO store_migrations") and args == ((2,),):
            raise KilledError
        return super().execute(sql, *args)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while it makes one leaves none that nobody can open; whoever comes second takes the first."""
    from choreo_agents.graph.durable import finding

    path, connect = tmp_path / "states.lineage", sqlite3.connect
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(sqlite3, "connect", partial(connect, factory=Dying))
        finding.open_store(path)
    assert not [*tmp_path.iterdir()]
    first: list[BaseStore] = []

    def slowly(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        first.append(finding._create_store(path))
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", slowly)
    second = finding._create_store(path)
    first[0].put(("choreo", "rows"), "a", {"v": 1})
    found = second.get(("choreo", "rows"), "a")
    assert found is not None and found.value == {"v": 1} and [*tmp_path.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_locked_file_is_waited_for(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, own = make_engine(salt="s"), thread()
    with beside(tmp_path) as saver:
        app = graph().compile(saver, engine=engine)
        app.invoke(ASKED, thread())
        other = sqlite3.connect(tmp_path / "states.lineage", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        done: list[Any] = []
        running = threading.Thread(target=lambda: done.append(app.invoke(ASKED, own)))
        running.start()
        while engine.stats().unfinished or engine.stats().steps < 10:
            threading.Event().wait(0.01)
        assert not done
        other.execute("COMMIT")
        running.join(60)
        assert len(done[0]["handles"]) == 4
