"""Where rows and notes stand in a LangGraph store.

    ("choreo", "rows", tenant)              id      from what a message is computed
    ("choreo", "notes", tenant, thread, id) digest  what a thread says of it: all of them together
    ("choreo", "answers", tenant, thread)   call    which message answers a call of the thread
    ("choreo", "holders", tenant, id)       thread  that this thread needs it, itself or for what came of it
    ("choreo", "leaving", tenant)           id      a row that is being deleted, until it is known that nobody needs it

Tenants and threads are named by digests under the tenant's key. A row is there for as long as it has a holder.
A note stands under a digest of itself, and whoever has more to say replaces those that it has read: two processes that
add to one at the same time leave two.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from langgraph.store.base import BaseStore, GetOp, Op, PutOp, SearchItem, SearchOp

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import FORMAT, Answered, DamagedRowError, DescribedMessage, LineageRow, Note
from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.commits import Commits
from choreo_agents.graph.sync_bridge import stands_still

ROOT = "choreo"
_NONE: Mapping[str, Collection[str]] = {}
_ID = "\x1f"
"""Stands for a thread's id, which a store is not to tell."""
_HOLDS = {"v": FORMAT}
"""What stands where a thread holds a message."""
_AT_ONCE = 512
"""Operations in one question to a store; SQLite takes no more than so many parameters."""
_WRITTEN_AT_ONCE = 4096
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
        self._ids: dict[str, str] = {}
        """Of threads, by their names here."""
        self.damaged: dict[str, str] = {}
        """What was found and could not be read, by id, and why."""

    def thread(self, thread: str) -> str:
        """What a thread is called here."""
        name = self._sealed.thread(thread)
        self._ids[name] = thread
        return name

    def writes(
        self, thread: str, described: Iterable[DescribedMessage], replaced: Mapping[str, Collection[str]] = _NONE
    ) -> list[PutOp]:
        """What writes messages for a thread, by its name here. No part of a store's index: nobody searches it.

        Args:
            thread: Its name here.
            described: The messages.
            replaced: Digests of notes that these contain, by the messages' ids.
        """
        ops = list[PutOp]()
        for row, note, memos in described:
            ops.append(PutOp(rows_of(self._tenant), row.id, self._sealed.row(row), index=False))
            place, digest = notes_of(self._tenant, thread, note.id), digest_of(note)
            ops.append(PutOp(place, digest, self._sealed.note(thread, note), index=False))
            ops += [PutOp(place, each, None) for each in replaced.get(note.id, ()) if each != digest]
            ops.append(PutOp(holders_of(self._tenant, row.id), thread, _HOLDS, index=False))
            ops += [self._answer(thread, Answered(memo, note.id)) for memo in memos]
        return ops

    def _answer(self, thread: str, answered: Answered) -> PutOp:
        thread_id = self._ids.get(thread)
        if thread_id:  # calls are named by the thread's id, which may name a person
            answered = replace(answered, memo=answered.memo.replace(thread_id, _ID))
        sealed = self._sealed.answer(thread, answered)
        return PutOp(answers_of(self._tenant, thread), self._sealed.call(thread, answered.memo), sealed, index=False)

    async def notes(self, thread: str) -> list[Note]:
        """All that a thread, by its name here, has written of messages: of some more than one."""
        found = list[Note]()
        for item in await everything(self.store, notes_of(self._tenant, thread), depth=1):
            message_id = item.namespace[-1]
            try:
                note = self._sealed.read_note(thread, item.value)
                _require_own_place(message_id, note.id)
                found.append(note)
            except DamagedRowError as error:
                self.damaged[message_id] = str(error)
        return found

    async def answers(self, thread: str) -> dict[str, str]:
        """The ids of messages that answer a thread's calls, by the calls' memos: those that can be read."""
        found = dict[str, str]()
        for item in await everything(self.store, answers_of(self._tenant, thread)):
            with suppress(DamagedRowError):  # it is asked again
                answered = self._sealed.read_answer(thread, item.value)
                _require_own_place(item.key, self._sealed.call(thread, answered.memo))
                found[answered.memo.replace(_ID, self._ids.get(thread, _ID))] = answered.id
        return found

    async def rows(self, ids: Sequence[str]) -> dict[str, LineageRow]:
        """Those of these messages that are here, by id."""
        found: dict[str, LineageRow] = {}
        for place in (rows_of(self._tenant), leaving_of(self._tenant)):
            missing = [each for each in ids if each not in found]
            for item in await asked(self.store, [GetOp(place, each, refresh_ttl=False) for each in missing]):
                if item is None:
                    continue
                try:
                    row = self._sealed.read_row(item.value)
                    _require_own_place(item.key, row.id)
                    found[item.key] = row
                except DamagedRowError as error:
                    self.damaged[item.key] = str(error)
        return found


def rows_of(tenant: str) -> tuple[str, ...]:
    """Where a tenant's rows stand."""
    return (ROOT, "rows", tenant)


def notes_of(tenant: str, thread: str, message_id: str | None = None) -> tuple[str, ...]:
    """Where a thread's notes stand: all of them below it, or those of a message in it."""
    return (ROOT, "notes", tenant, thread, *(() if message_id is None else (message_id,)))


def digest_of(note: Note) -> str:
    """What a note stands under."""
    return hashlib.sha256(json.dumps(note.plain(), sort_keys=True).encode()).hexdigest()[:16]


def answers_of(tenant: str, thread: str) -> tuple[str, ...]:
    """Where it stands what a thread's calls were answered."""
    return (ROOT, "answers", tenant, thread)


def holders_of(tenant: str, message_id: str) -> tuple[str, ...]:
    """Where it stands who holds a message."""
    return (ROOT, "holders", tenant, message_id)


def leaving_of(tenant: str) -> tuple[str, ...]:
    """Where rows stand that are being deleted."""
    return (ROOT, "leaving", tenant)


def commits_of(store: BaseStore) -> Commits:
    """Through which all that is written to a store goes: the same for all who write there."""
    found = _commits.get(store)
    if found is None:
        weak = _Weak(store)
        found = _commits.setdefault(store, Commits(weak.write))
    return found


def _require_own_place(place: str, own: str) -> None:
    """Raise `DamagedRowError` if what is said of a message or call stands in another's place: no seal tells that."""
    if place != own:
        raise DamagedRowError(f"it is {own}'s, and somebody has put it in this place")


async def everything(store: BaseStore, namespace: tuple[str, ...], *, depth: int = 0) -> list[SearchItem]:
    """Read all that stands in a namespace, or in those that are so many names deeper.

    In one answer: between two pages others write, and of what was written together PostgreSQL shows any order, each
    time another.
    """
    own, limit = len(namespace), _PAGE
    while True:
        [found] = await asked(store, [SearchOp(namespace, limit=limit, refresh_ttl=False)])
        if len(found) < limit:
            return [item for item in found if len(item.namespace) == own + depth and item.namespace[:own] == namespace]
        limit *= 8


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
        # In order: a part that was written has the rows of its notes.
        for start in range(0, len(ops), _WRITTEN_AT_ONCE):
            await _done(store, ops[start : start + _WRITTEN_AT_ONCE])
        return None


async def _done(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
    try:
        loop = getattr(store, "loop", None)  # LangGraph's async stores have one
        if stands_still(loop):
            raise RuntimeError("a sync call waits in the event loop that the store answers in: await ainvoke there")
        if loop in (None, asyncio.get_running_loop()):
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
