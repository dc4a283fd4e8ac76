"""Where rows and notes stand in a LangGraph store.

    ("choreo", "rows", tenant)             id      from what a message is computed
    ("choreo", "notes", tenant, thread)    id      what a thread says of it
    ("choreo", "holders", tenant, id)      thread  that this thread needs it, itself or for what came of it

Tenants and threads are named by digests under the tenant's key. A row is there for as long as it has a holder.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

from langgraph.store.base import BaseStore, GetOp, Op, PutOp, SearchOp

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import DamagedRowError, DescribedMessage, LineageRow, Note
from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.commits import Commits

ROOT = "choreo"
_AT_ONCE = 512
"""Operations in one question to a store; SQLite takes no more than so many parameters."""
_PAGE = 4096
_commits: WeakKeyDictionary[BaseStore, Commits] = WeakKeyDictionary()


class LineageStore:
    """A store, as one tenant's lineage stands in it.

    Every method raises `StoreError` if the store fails.

    Args:
        store: LangGraph's.
        engine: The tenant's: any of those that have its key.
    """

    def __init__(self, store: BaseStore, engine: Engine) -> None:
        self.store = store
        self._sealed, self._tenant = engine.lineage.sealed, engine.lineage.name
        self.commits = commits_of(store)
        self.damaged: dict[str, str] = {}
        """What was found and could not be read, by id, and why."""

    def thread(self, thread: str) -> str:
        """What a thread is called here."""
        return self._sealed.thread(thread)

    def writes(self, thread: str, described: Iterable[DescribedMessage]) -> list[PutOp]:
        """What writes messages for a thread, by its name here. No part of a store's index: nobody searches it."""
        ops: list[PutOp] = []
        for row, note in described:
            ops.append(PutOp(self._rows(), row.id, self._sealed.row(row), index=False))
            ops.append(PutOp(self._notes(thread), row.id, self._sealed.note(thread, note), index=False))
            ops.append(PutOp(self._holders(row.id), thread, {"v": 1}, index=False))
        return ops

    async def notes(self, thread: str) -> dict[str, Note]:
        """All that a thread has written of messages, by id."""
        found: dict[str, Note] = {}
        for message_id, value in await everything(self.store, self._notes(thread)):
            try:
                found[message_id] = self._sealed.read_note(thread, value)
            except DamagedRowError as error:
                self.damaged[message_id] = str(error)
        return found

    async def rows(self, ids: Sequence[str]) -> dict[str, LineageRow]:
        """Those of these messages that are here, by id."""
        found: dict[str, LineageRow] = {}
        for item in await asked(self.store, [GetOp(self._rows(), each, refresh_ttl=False) for each in ids]):
            if item is not None:
                try:
                    found[item.key] = self._sealed.read_row(item.value)
                except DamagedRowError as error:
                    self.damaged[item.key] = str(error)
        return found

    def _rows(self) -> tuple[str, ...]:
        return (ROOT, "rows", self._tenant)

    def _notes(self, thread: str) -> tuple[str, ...]:
        return (ROOT, "notes", self._tenant, thread)

    def _holders(self, message_id: str) -> tuple[str, ...]:
        return (ROOT, "holders", self._tenant, message_id)


def commits_of(store: BaseStore) -> Commits:
    """Through which all that is written to a store goes: the same for all who write there."""
    found = _commits.get(store)
    if found is None:
        weak = _Weak(store)
        found = _commits.setdefault(store, Commits(weak.write))
    return found


async def everything(store: BaseStore, namespace: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """All that stands in a namespace."""
    found: dict[str, dict[str, Any]] = {}
    while True:
        op = SearchOp(namespace, limit=_PAGE, offset=len(found), refresh_ttl=False)
        [items] = await asked(store, [op])
        before = len(found)
        found |= {item.key: item.value for item in items if item.namespace == namespace}
        if len(items) < _PAGE or len(found) == before:
            return [*found.items()]


async def asked(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
    """What a store answers, however it is asked: from this event loop, or from a thread that may wait for it.

    Raises:
        StoreError: It has failed.
    """
    answers: list[Any] = []
    for start in range(0, len(ops), _AT_ONCE):
        answers += await _done(store, ops[start : start + _AT_ONCE])
    return answers


class _Weak:
    """Writes to a store that it does not keep alive."""

    def __init__(self, store: BaseStore) -> None:
        self._store = ref(store)

    async def write(self, ops: Sequence[PutOp]) -> object:
        store = self._store()
        assert store is not None, "whoever writes has it"
        return await _done(store, ops)


async def _done(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
    try:
        if getattr(store, "loop", None) in (None, asyncio.get_running_loop()):  # LangGraph's async stores have one
            try:
                return await store.abatch(ops)
            except NotImplementedError:  # a store that is sync only
                pass
        return await asyncio.to_thread(store.batch, ops)
    except Exception as error:
        await asyncio.to_thread(_rolled_back, store)
        raise StoreError(
            f"the store {type(store).__name__} of the run's lineage has failed ({error!r}): nothing that was reported "
            "is lost; run it again when the store works"
        ) from error


def _rolled_back(store: BaseStore) -> None:
    """Let what follows begin anew: a commit that fails leaves SQLite in its transaction."""
    connection = getattr(store, "conn", None)
    if isinstance(connection, sqlite3.Connection) and connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.rollback()
