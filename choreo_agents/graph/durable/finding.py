"""Choice of the LangGraph store that keeps the lineage of a run, in this order:

the graph's own    `compile(lineage=store)`; `compile(lineage=False)`: none
the run's          `compile(store=...)`, or the store of a platform
SQLite             `states.sqlite.lineage` beside the file `states.sqlite` of a SQLite checkpointer
none               no checkpointer keeps the run's states, or the engine has no salt
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
"""Seconds that a commit waits for another process's write lock."""
_DATABASES = "PRAGMA database_list"
_files: WeakKeyDictionary[Any, Path | None] = WeakKeyDictionary()
"""Database files of checkpointers; None: in memory."""
_opened: dict[tuple[Path, int], tuple[tuple[int, int] | None, BaseStore]] = {}
_lock = threading.Lock()


def require_choice(choice: Any, engine: Engine | None, *, by_tenant: bool) -> None:
    """Raise `InvalidRequestError` unless `compile(lineage=...)` is valid for this engine."""
    if choice is None or choice is False:
        return
    if not isinstance(choice, BaseStore):
        raise InvalidRequestError(f"lineage must be a LangGraph store, False or None, not {choice!r}")
    if engine is not None and not by_tenant and not engine.lineage.seals.salted:
        raise InvalidRequestError(
            "lineage is signed with a key derived from the engine's salt, but it has none: load the engine with "
            "salt=..., a secret that is the same in every process that continues the run"
        )


async def lineage_store_of(config: RunnableConfig) -> BaseStore | None:
    """Return the store that keeps the lineage of a node's run; None: none does.

    Raises:
        StoreError: The store cannot be opened.
    """
    return await _choose_store(RunContext.of(config).lineage, store_of(config), saver_of(config))


async def lineage_store_for(graph: Any, config: RunnableConfig, choice: LineageChoice) -> BaseStore | None:
    """Return the store that keeps the lineage of a compiled graph's runs, outside of a run; raises the same.

    Args:
        graph: The compiled graph.
        config: Config that it is called with.
        choice: Its `compile(lineage=...)`.
    """
    outer = RunContext.of(config)
    return await _choose_store(choice if outer.thread is None else outer.lineage, graph.store, saver_of(config, graph))


async def _choose_store(choice: Any, default: BaseStore | None, saver: Any) -> BaseStore | None:
    if choice is False or saver is None:
        return None
    return choice if isinstance(choice, BaseStore) else default or await store_beside(saver)


# The file beside a SQLite checkpointer's


async def store_beside(saver: Any) -> BaseStore | None:
    """Return the store in the file beside a SQLite checkpointer's; None: it is in memory, or no SQLite checkpointer.

    Raises:
        StoreError: The file cannot be created or read.
    """
    if not any(base.__module__.startswith("langgraph.checkpoint.sqlite") for base in type(saver).__mro__):
        return None
    if saver not in _files:
        _files[saver] = await _database_path(saver.conn)
    database = _files[saver]
    if database is None:
        return None
    return await asyncio.to_thread(open_store, database.with_name(database.name + SUFFIX))


def open_store(path: Path) -> BaseStore:
    """Return the store in a file, which is created for its user alone; one object per file and process.

    Raises:
        StoreError: The file cannot be created or read.
    """
    key = (path, os.getpid())
    with _lock:
        if key not in _opened or _file_id(path) != _opened[key][0]:  # the file was removed or replaced
            try:
                store = _create_store(path)
                _opened[key] = _file_id(path), store
            except (OSError, sqlite3.Error) as error:
                raise StoreError(
                    f"cannot store the lineage of runs in {str(path)!r} ({error!r}): free space or permit writing, "
                    "pass compile(lineage=...) another store, or turn it off with lineage=False"
                ) from error
        return _opened[key][1]


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None: there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _create_store(path: Path) -> BaseStore:
    from langgraph.store.sqlite import SqliteStore  # noqa: PLC0415 - installed with the SQLite checkpointer

    if not path.exists():
        # Set up aside and linked: a process that is killed leaves no half-made file, and two at once do not collide.
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        os.close(descriptor)
        try:
            with closing(_connect(Path(draft))) as connection:
                SqliteStore(connection).setup()
            with suppress(OSError):  # another process was first; or the file system has no links
                os.link(draft, path)
        finally:
            Path(draft).unlink()
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    store = SqliteStore(_connect(path))
    store.setup()
    return store


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_BUSY_S)
    connection.execute("PRAGMA secure_delete=ON")  # deleted threads are overwritten in the file
    return connection


async def _database_path(connection: Any) -> Path | None:
    """Return the file of a connection of `sqlite3` or `aiosqlite`; None: in memory."""
    if isinstance(connection, sqlite3.Connection):
        rows = await asyncio.to_thread(lambda: connection.execute(_DATABASES).fetchall())
    else:
        rows = await connection.execute_fetchall(_DATABASES)
    return next((Path(file) for _, name, file in rows if name == "main" and file), None)
