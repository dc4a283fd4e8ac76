"""Which store keeps the lineage of a run; and the file beside that of a SQLite checkpointer: `states.sqlite` has its
lineage in `states.sqlite.lineage`.

the graph's own    `compile(lineage=store)`; `compile(lineage=False)`: none
the run's          `compile(store=...)`, or what a platform brings
beside             a file beside that of a SQLite checkpointer
none               nothing keeps the run's states in a file, or its engine has no salt
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, StoreError
from choreo_agents.graph.langgraph_internals import saver_of, store_of
from choreo_agents.graph.run_context import LineageChoice, RunContext

SUFFIX = ".lineage"
_BUSY_S = 30.0
"""For so long another process may write before a commit fails."""
_DATABASES = "PRAGMA database_list"
_files: WeakKeyDictionary[Any, Path | None] = WeakKeyDictionary()
"""Of checkpointers."""
_opened: dict[tuple[Path, int], tuple[tuple[int, int] | None, BaseStore]] = {}
_lock = threading.Lock()


def require_choice(choice: Any, engine: Engine | None, *, by_tenant: bool) -> None:
    """Raise `InvalidRequestError` unless lineage can be kept so."""
    if choice is None or choice is False:
        return
    if not isinstance(choice, BaseStore):
        raise InvalidRequestError(f"lineage must be a LangGraph store, False or None, not {choice!r}")
    if engine is not None and not by_tenant and not engine.lineage.seals.salted:
        raise InvalidRequestError(
            "what is kept of a run is sealed with a key made of the engine's salt, and this one has none: load it with "
            "salt=..., a secret of yours, the same in every process that is to go on with the run"
        )


async def lineage_store_of(config: RunnableConfig) -> BaseStore | None:
    """The store that keeps the lineage of the run that a node stands in; None: nothing does.

    Raises:
        StoreError: It cannot be opened.
    """
    return await _found(RunContext.of(config).lineage, store_of(config), saver_of(config))


async def lineage_store_for(graph: Any, called: RunnableConfig, choice: LineageChoice) -> BaseStore | None:
    """The store that keeps the lineage of a compiled graph's runs, outside of any; raises the same.

    Args:
        graph: Compiled.
        called: The config that it is called with.
        choice: The graph's own.
    """
    around = RunContext.of(called)
    return await _found(choice if around.thread is None else around.lineage, graph.store, saver_of(called, graph))


async def _found(choice: Any, usual: BaseStore | None, saver: Any) -> BaseStore | None:
    if choice is False or saver is None:
        return None
    return choice if isinstance(choice, BaseStore) else usual or await store_beside(saver)


# The file beside


async def store_beside(saver: Any) -> BaseStore | None:
    """The store in the file beside a checkpointer's; None if that has no file, or is none of SQLite's.

    Raises:
        StoreError: The file cannot be made or read.
    """
    if not any(each.__module__.startswith("langgraph.checkpoint.sqlite") for each in type(saver).__mro__):
        return None
    if saver not in _files:
        _files[saver] = await _file_of(saver.conn)
    states = _files[saver]
    if states is None:
        return None
    return await asyncio.to_thread(opened, states.with_name(states.name + SUFFIX))


def opened(path: Path) -> BaseStore:
    """The store in a file, made if need be, which only its user may read: one for each file and process.

    Raises:
        StoreError: It cannot be made or read.
    """
    key = (path, os.getpid())
    with _lock:
        if key not in _opened or _file(path) != _opened[key][0]:  # somebody has removed it
            try:
                store = _store(path)
                _opened[key] = _file(path), store
            except (OSError, sqlite3.Error) as error:
                raise StoreError(
                    f"the lineage of runs cannot be kept in {str(path)!r} ({error!r}): make room or give the right to "
                    "write there, choose a store with compile(lineage=...), or leave it out with lineage=False"
                ) from error
        return _opened[key][1]


def _file(path: Path) -> tuple[int, int] | None:
    """Which file that is; None: none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _store(path: Path) -> BaseStore:
    from langgraph.store.sqlite import SqliteStore  # noqa: PLC0415 - where there is a SQLite checkpointer, it is there

    if not path.exists():
        # What is set up in place is half made if its process is killed, and another's that does so at once fails.
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        os.close(handle)
        try:
            with closing(_connected(Path(aside))) as connection:
                SqliteStore(connection).setup()
            with suppress(OSError):  # it is there now; or links cannot be made in this folder
                os.link(aside, path)
        finally:
            Path(aside).unlink()
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    store = SqliteStore(_connected(path))
    store.setup()
    return store


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_BUSY_S)
    connection.execute("PRAGMA secure_delete=ON")  # what is forgotten is overwritten
    return connection


async def _file_of(connection: Any) -> Path | None:
    """The file of a connection of `sqlite3`, or of its async face, which has a thread of its own."""
    if isinstance(connection, sqlite3.Connection):
        found = await asyncio.to_thread(lambda: connection.execute(_DATABASES).fetchall())
    else:
        found = await connection.execute_fetchall(_DATABASES)
    return next((Path(file) for _, name, file in found if name == "main" and file), None)  # SQLite says where it is
