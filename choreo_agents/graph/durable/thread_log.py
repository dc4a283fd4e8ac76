"""The log of a thread in a LangGraph store: from what its messages are computed, and which calls they answer.

    ("choreo", tenant, thread)    NUMBER ID    what one commit has written, under the tenant's seal

Tenants and threads are named by digests under the tenant's key. A log has all that its thread's messages come from,
what other threads have, too, included: it is deleted as a whole, and ends by the store's own TTL.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from langgraph.store.base import BaseStore, Op, PutOp, SearchItem, SearchOp

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import DamagedRowError, DescribedMessage, LineageRow, Note
from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.commits import Commits
from choreo_agents.graph.sync_bridge import stands_still

ROOT = "choreo"
FORMAT = 2
"""Of what a commit writes; what was written in another is not read."""
_SEAL = "seal"
_ID = "\x1f"
"""Stands for a thread's id, which may name a person, in the names of its calls."""
_COMPARED = 4
"""How many rows that were written last may be named in the place of a row's parents, beside the last ..."""
_REMEMBERED = 1024
"""... that began as it does: so many are remembered."""
_PAGE = 4096
_AT_ONCE = 512
"""Deletions in one operation of the store; SQLite takes no more than so many parameters."""
_commits: WeakKeyDictionary[BaseStore, Commits] = WeakKeyDictionary()


@dataclass
class ReadLog:
    """What a log says."""

    rows: dict[str, LineageRow] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    """All that was said of each message."""
    answers: dict[str, str] = field(default_factory=dict)
    """The ids of messages that answer calls, by the calls' memos: the last that did."""
    damaged: str | None = None
    """Why something in it is not believed."""


class ThreadLog:
    """Of one thread, in one store. Its methods raise `StoreError` if that fails.

    Args:
        store: LangGraph's.
        engine: The tenant's: any of those that have its key.
        thread: The thread's id.
    """

    def __init__(self, store: BaseStore, engine: Engine, thread: str) -> None:
        self.store, self._thread, self._seals = store, thread, engine.lineage.seals
        self.place = (ROOT, engine.lineage.name, self._seals.drawn("lineage", thread))
        self.commits = commits_of(store)
        self._rows: dict[Any, LineageRow] = {}
        """The last that was written of those that begin alike, the latest behind."""
        self._keys: set[str] = set()
        """Of all commits that are known."""
        self._last = 0
        """The number of the last of them: of one that is later it is larger, in every process."""
        self._read_s = 0.0
        """When it was read, as `time.monotonic` counts."""

    @property
    def _ttl_minutes(self) -> float | None:
        return (self.store.ttl_config or {}).get("default_ttl") if self.store.supports_ttl else None

    @property
    def is_stale(self) -> bool:
        """Whether it is to be read again, so that the store's TTL begins anew for all of it."""
        return self._ttl_minutes is not None and time.monotonic() - self._read_s > self._ttl_minutes * 30

    async def write(self, described: Sequence[DescribedMessage]) -> None:
        """Write messages, and return when they are committed; what is enqueued by this call is in order."""
        said, before = list[dict[str, Any]](), {**self._rows}
        for row, note, memos in described:
            told: dict[str, Any] = {}
            if row is not None:
                others = [*reversed(before.values())][:_COMPARED]
                told["row"] = row.plain([before[_begins(row)], *others] if _begins(row) in before else others)
                _remember(before, row)
            calls = [memo.replace(self._thread, _ID) for memo in memos]
            said.append({**told, "note": note.plain(), **({"answers": calls} if calls else {})})
        self._last = max(self._last + 1, time.time_ns())
        key, plain = f"{self._last:020} {uuid.uuid4().hex[:12]}", {"v": FORMAT, "said": said}
        value = {**plain, _SEAL: self._seals.seal(self._kind(key), plain)}
        # No part of a store's index: nobody searches it.
        await self.commits.enqueue([PutOp(self.place, key, value, index=False, ttl=self._ttl_minutes)])
        self._keys.add(key)
        for each in described:
            if each.row is not None:
                _remember(self._rows, each.row)

    async def is_known(self) -> bool:
        """Whether there is what was read and written here, and nothing else: neither has another process written since,
        nor was it forgotten, nor has something come to its end."""
        count = len(self._keys)
        [found] = await asked(self.store, [SearchOp(self.place, limit=2, offset=max(count - 1, 0), refresh_ttl=False)])
        return [item.key in self._keys for item in found] == [True] * min(count, 1)

    async def read(self) -> ReadLog:
        """All that it says. What was changed since, or is not of this thread, is left out."""
        found, began_s = ReadLog(), time.monotonic()
        items = await everything(self.store, self.place)
        self._keys, self._read_s = {item.key for item in items}, began_s
        self._rows.clear()
        for item in items:
            try:
                self._last = max(self._last, int(item.key.split()[0]))
                for said in self._opened(item):
                    self._add(found, said)
            except ValueError as error:
                found.damaged = str(error)
        return found

    async def delete(self, discard: Callable[[Sequence[str]], None]) -> None:
        """Delete all of it, the last first: what is left, if that is broken off, is whole.

        Args:
            discard: Removes, before that, whatever else there is of its messages, by their ids.
        """
        await self.commits.enqueue([])  # what somebody has left that waited to be written is there then
        items, ids = await everything(self.store, self.place), dict[str, None]()
        for item in items:
            with suppress(ValueError):
                ids |= {Note.read(said["note"]).id: None for said in self._opened(item)}
        discard([*ids])
        for start in range(0, len(items), _AT_ONCE):
            some = [*reversed(items)][start : start + _AT_ONCE]
            await self.commits.enqueue([PutOp(self.place, item.key, None) for item in some])

    def _add(self, found: ReadLog, said: Mapping[str, Any]) -> None:
        note = Note.read(said["note"])
        if "row" in said:
            row = found.rows[note.id] = LineageRow.read(said["row"], found.rows)
            _remember(self._rows, row)
        before = found.notes.get(note.id)
        found.notes[note.id] = note if before is None else note.merged(before)
        for memo in said.get("answers", ()):
            found.answers[memo.replace(_ID, self._thread)] = note.id

    def _opened(self, item: SearchItem) -> Sequence[Mapping[str, Any]]:
        value: Any = item.value
        if not isinstance(value, Mapping):
            raise DamagedRowError(f"it is no object of JSON, but {type(value).__name__}")
        plain = {name: each for name, each in value.items() if name != _SEAL}
        if not self._seals.holds(value.get(_SEAL), self._kind(item.key), plain):
            raise DamagedRowError("it does not bear the tenant's seal: somebody else wrote it, or has changed it")
        if plain.get("v") != FORMAT:
            raise DamagedRowError(f"it is written in format {plain.get('v')!r}, not {FORMAT}: another release wrote it")
        said: Sequence[Mapping[str, Any]] = plain["said"]
        return said

    def _kind(self, key: str) -> str:
        """What a seal is for: a commit of another thread, or from another place in it, is none of this."""
        return f"log {self.place[-1]} {key}"


def _begins(row: LineageRow) -> Any:
    """What a row's readers read first: the notes of an agent, behind what all are told."""
    return row.model, *((each, row.at + offset) for each, offset in row.parents[:2])


def _remember(rows: dict[Any, LineageRow], row: LineageRow) -> None:
    rows.pop(_begins(row), None)
    rows[_begins(row)] = row
    if len(rows) > _REMEMBERED:
        del rows[next(iter(rows))]


def commits_of(store: BaseStore) -> Commits:
    """Through which all that is written to a store goes: the same for all who write there."""
    found = _commits.get(store)
    if found is None:
        weak = _Weak(store)
        found = _commits.setdefault(store, Commits(weak.write))
    return found


async def everything(store: BaseStore, place: tuple[str, ...]) -> list[SearchItem]:
    """Read all that stands in a place, in order.

    In one answer: between two pages others write, and of what was written together PostgreSQL shows any order, each
    time another.
    """
    limit = _PAGE
    while True:
        [found] = await asked(store, [SearchOp(place, limit=limit)])
        if len(found) < limit:
            return sorted((item for item in found if item.namespace == place), key=lambda item: item.key)
        limit *= 8


class _Weak:
    """Writes to a store that it does not keep alive."""

    def __init__(self, store: BaseStore) -> None:
        self._store = ref(store)

    async def write(self, ops: Sequence[PutOp]) -> object:
        store = self._store()
        assert store is not None, "whoever writes has it"
        return await asked(store, ops)


async def asked(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
    """What a store answers, however it is asked: from this event loop, or from a thread that may wait for it.

    Raises:
        StoreError: It has failed.
    """
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
        first = error.__context__ or error  # of a full file SQLite's store says then that it cannot commit
        raise StoreError(
            f"the store {type(store).__name__} of the run's lineage has failed ({first!r}): nothing that was reported "
            "is lost; run it again when the store works"
        ) from error


def _rolled_back(store: BaseStore) -> None:
    """Let what follows begin anew: a commit that fails leaves SQLite in its transaction."""
    connection = getattr(store, "conn", None)
    if isinstance(connection, sqlite3.Connection) and connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.rollback()
