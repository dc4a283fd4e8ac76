"""Log of a thread in a LangGraph store: the lineage of its messages, and which calls they answer.

    ("choreo", tenant, thread)    NUMBER ID    the records of one commit, under the tenant's seal

Tenants and threads are named by digests under the tenant's key. A log is self-contained: it repeats what its messages
share with other threads, is deleted as a whole, and expires by the store's TTL. A node reads it if messages are missing
on the engine, and writes to it before it returns.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore, Op, PutOp, SearchItem, SearchOp

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import DamagedRowError, DescribedMessage, LineageRow, Note, ReadLog
from choreo_agents.engine.messages.message import Scope
from choreo_agents.errors import HandleError, StoreError
from choreo_agents.graph.durable.finding import lineage_store_of
from choreo_agents.graph.sync_bridge import is_blocked, run_to_end
from choreo_agents.kv.handle import MessageHandle

ROOT = "choreo"
FORMAT = 3
"""Format of commits; those of another format are not read."""
_SEAL = "seal"
_ID = "\x1f"
"""Placeholder for the thread's id, which may name a person, in idempotency keys."""
_COMPARED = 4
"""Number of recent rows that a row may refer to instead of listing its parents, beside the last ..."""
_REMEMBERED_ROWS = 1024
"""... row that began as it does; so many of those are remembered."""
_PAGE = 4096
"""Items that the first search asks for."""
_AT_ONCE = 512
"""Deletions in one operation of the store: SQLite bounds the number of parameters."""
_REMEMBERED = "lineage"
_commits: WeakKeyDictionary[BaseStore, Commits] = WeakKeyDictionary()
_known: WeakKeyDictionary[BaseStore, WeakValueDictionary[tuple[str, ...], ThreadLog]] = WeakKeyDictionary()
_lock = threading.Lock()
Write = Callable[[Sequence[PutOp]], Awaitable[object]]


class RunLineage:
    """Lineage of a thread on an engine, for one call of a node. Every method raises `StoreError` if the store fails.

    Args:
        engine: Engine of the node.
        scope: Scope of the thread on the engine.
        log: Log of the thread.
    """

    def __init__(self, engine: Engine, scope: Scope, log: ThreadLog) -> None:
        self._engine, self._scope, self._log = engine, scope, log
        self.refused: dict[str, str] = {}
        """Why messages could not be restored, by id."""
        self._last_call: str | None = None
        """Idempotency key of the last call."""

    async def restore(self, handles: Iterable[MessageHandle]) -> None:
        """Restore messages that the engine does not know; those that cannot be are in `refused`."""
        missing = self._engine.lineage.unknown(handles, self._scope)
        if missing:
            await self._take_in([handle.id for handle in missing])

    async def recall(self, idempotency_key: str, *, regenerate: bool) -> None:
        """Restore the earlier answer of a call, if any process has written one.

        Args:
            idempotency_key: Key of the call.
            regenerate: Whether the call is made anyway, and its answer replaces the earlier one.
        """
        self._last_call = idempotency_key
        if regenerate:
            return
        content = None if await self._log.is_known() else await self._log.read()
        missing = self._engine.lineage.recall(self._log.answering(idempotency_key), self._scope)
        if missing:
            await self._take_in(missing, content)

    async def commit(self, used: Iterable[MessageHandle], owned: Iterable[MessageHandle]) -> None:
        """Write the lineage of messages and of all their ancestors, and return when it is committed.

        The KV of `used` is persisted in the background, if the engine persists any.

        Args:
            used: Messages that the call has read or decoded.
            owned: Other messages of the thread, which may have come from another thread.
        """
        log = self._log
        if log.is_stale:
            await log.read()
        with log.lock:
            handles = [*used, *(handle for handle in owned if handle.id not in log.notes)]
            described = self._engine.lineage.described(handles, self._scope, log.notes, log.answers, self._last_call)
        if not described:
            return
        await log.write(described)
        kv = self._engine.kv
        stored = [h for h, tier in zip(handles, kv.tiers(handles), strict=True) if tier not in (None, "lineage")]
        with suppress(HandleError):  # released meanwhile: it is recomputed when needed
            kv.persist(stored)

    async def _take_in(self, missing: Sequence[str], log: ReadLog | None = None) -> None:
        """Restore messages, and all answers of the thread: the next call may need one of them."""
        log = log or await self._log.read()
        taken = [*missing, *(answer for answer in {*log.answers.values()} if answer in log.rows)]
        visited, waiting = {*taken}, [*taken]
        while waiting:
            sources = _sources_of(waiting.pop(), log)
            waiting += sources - visited
            visited |= sources
        await asyncio.to_thread(self._engine.lineage.look_for_kv, visited & log.rows.keys())
        refused = self._engine.lineage.import_messages(taken, log, self._scope)
        with self._log.lock:
            for message_id in visited - log.rows.keys():
                self._log.notes.pop(message_id, None)  # the next commit of the message writes its row again
        why = "" if log.damaged is None else f"; something that the thread has written is not believed: {log.damaged}"
        self.refused |= {message_id: f"{refused[message_id]}{why}" for message_id in missing if message_id in refused}


def _sources_of(message_id: str, content: ReadLog) -> set[str]:
    note, row = content.notes.get(message_id), content.rows.get(message_id)
    sources = set() if note is None else {*note.sources, *(thought for thought, _ in note.thoughts)}
    return sources | (set() if row is None else {parent for parent, _ in row.parents})


async def lineage_of(
    engine: Engine, config: RunnableConfig, thread: object, scope: Scope, remembered: dict[str, Any]
) -> RunLineage | None:
    """Return the lineage of a node's thread; None: it is not kept. Raises `StoreError` if the store cannot be opened.

    Args:
        engine: Engine of the node.
        config: Config of the node.
        thread: Id of the thread; an `EphemeralRun` is never kept.
        scope: Scope of the thread on the engine.
        remembered: Data that the engine keeps with the thread: its log is cached there.
    """
    store = await lineage_store_of(config) if isinstance(thread, str) and engine.lineage.seals.salted else None
    if store is None or not isinstance(thread, str):
        return None
    log = remembered.get(_REMEMBERED)
    if log is None or log.store is not store:
        log = remembered[_REMEMBERED] = known_log(ThreadLog(store, engine, thread))
    return RunLineage(engine, scope, log)


def known_log(log: ThreadLog) -> ThreadLog:
    """Return this process's log of the same thread and store: engines share it, until the last forgets the thread."""
    with _lock:
        return _known.setdefault(log.store, WeakValueDictionary()).setdefault(log.place, log)


class ThreadLog:
    """Log of one thread in one store, and this process's copy of it. Its methods raise `StoreError` if the store fails.

    Args:
        store: LangGraph store.
        engine: Any engine with the tenant's key.
        thread: Id of the thread.
    """

    def __init__(self, store: BaseStore, engine: Engine, thread: str) -> None:
        self.store, self._thread, self._seals = store, thread, engine.lineage.seals
        self.place = (ROOT, engine.lineage.name, self._seals.drawn("lineage", thread))
        self.commits = commits_of(store)
        self._rows: dict[Any, LineageRow] = {}
        """Last written row by the beginning of its view, the latest last."""
        self._keys: set[str] = set()
        """Keys of all known commits."""
        self._last = 0
        """Number of the last commit, from the clock: later commits have larger ones, in every process."""
        self._read_s = 0.0
        """`time.monotonic` of the last read."""
        self.lock = threading.Lock()
        """Guards `notes` and `answers`, which several engines use from their threads."""
        self.notes: dict[str, Note] = {}
        """Merged notes by message id."""
        self.answers: dict[str, str] = {}
        """Ids of answers by the idempotency keys of their calls."""

    @property
    def _ttl_minutes(self) -> float | None:
        return (self.store.ttl_config or {}).get("default_ttl") if self.store.supports_ttl else None

    @property
    def is_stale(self) -> bool:
        """True if half of the TTL has passed since the last read, which refreshes it for all items."""
        return self._ttl_minutes is not None and time.monotonic() - self._read_s > self._ttl_minutes * 30

    async def write(self, described: Sequence[DescribedMessage]) -> None:
        """Write messages, and return when they are committed. Concurrent calls commit in the order of the calls."""
        records, rows = list[dict[str, Any]](), {**self._rows}
        for row, note, keys in described:
            record: dict[str, Any] = {}
            if row is not None:
                recent = [*reversed(rows.values())][:_COMPARED]
                record["row"] = row.plain([rows[_row_start(row)], *recent] if _row_start(row) in rows else recent)
                _remember(rows, row)
            calls = [memo.replace(self._thread, _ID) for memo in keys]
            records.append({**record, "note": note.plain(), **({"answers": calls} if calls else {})})
        self._last = max(self._last + 1, time.time_ns())
        key, plain = f"{self._last:020} {uuid.uuid4().hex[:12]}", {"v": FORMAT, "said": records}
        value = {**plain, _SEAL: self._seals.seal(self._seal_purpose(key), plain)}
        # Not in the store's search index: items are sealed, and read by namespace only.
        await self.commits.enqueue([PutOp(self.place, key, value, index=False, ttl=self._ttl_minutes)])
        self._keys.add(key)
        with self.lock:
            for row, note, keys in described:
                if row is not None:
                    _remember(self._rows, row)
                before = self.notes.get(note.id)
                self.notes[note.id] = note if before is None else before.merged(note)
                self.answers.update(dict.fromkeys(keys, note.id))

    async def is_known(self) -> bool:
        """Return whether the store has exactly the known commits: no other process wrote, deleted, and none expired.

        Two items suffice: the last known one is there at its offset, and nothing after it.
        """
        count = len(self._keys)
        search = SearchOp(self.place, limit=2, offset=max(count - 1, 0), refresh_ttl=False)
        [items] = await run_store_ops(self.store, [search])
        return [item.key in self._keys for item in items] == [True] * min(count, 1)

    async def read(self) -> ReadLog:
        """Read the whole log. Items that were tampered with, or belong to another thread, are skipped."""
        content, began_s = ReadLog(), time.monotonic()
        items = await read_items(self.store, self.place)
        self._keys, self._read_s = {item.key for item in items}, began_s
        self._rows.clear()
        for item in items:
            try:
                self._last = max(self._last, int(item.key.split()[0]))
                for record in self._unseal(item):
                    self._add(content, record)
            except ValueError as error:
                content.damaged = str(error)
        with self.lock:
            self.notes, self.answers = content.notes, content.answers
        return content

    def answering(self, call: str) -> dict[str, str]:
        """Return the ids of a call's answers, by their idempotency keys: each is the call's key and one more part."""
        with self.lock:
            return {key: message_id for key, message_id in self.answers.items() if key.rpartition(" ")[0] == call}

    async def delete(self, discard: Callable[[Sequence[str]], None]) -> None:
        """Delete the log, the last commit first, so that an interrupted deletion leaves a valid log.

        Args:
            discard: Called before with the ids of its messages, to remove their files.
        """
        await self.commits.enqueue([])  # flushes writes whose callers were cancelled: they would survive the deletion
        items, ids = await read_items(self.store, self.place), dict[str, None]()
        for item in items:
            with suppress(ValueError):
                ids |= {Note.read(record["note"]).id: None for record in self._unseal(item)}
        discard([*ids])
        for start in range(0, len(items), _AT_ONCE):
            batch = [*reversed(items)][start : start + _AT_ONCE]
            await self.commits.enqueue([PutOp(self.place, item.key, None) for item in batch])

    def _add(self, content: ReadLog, record: Mapping[str, Any]) -> None:
        note = Note.read(record["note"])
        if "row" in record:
            row = content.rows[note.id] = LineageRow.read(record["row"], content.rows)
            _remember(self._rows, row)
        before = content.notes.get(note.id)
        content.notes[note.id] = note if before is None else before.merged(note)
        for key in record.get("answers", ()):
            content.answers[key.replace(_ID, self._thread)] = note.id

    def _unseal(self, item: SearchItem) -> Sequence[Mapping[str, Any]]:
        value: Any = item.value
        if not isinstance(value, Mapping):
            raise DamagedRowError(f"it is no object of JSON, but {type(value).__name__}")
        plain = {name: member for name, member in value.items() if name != _SEAL}
        if not self._seals.holds(value.get(_SEAL), self._seal_purpose(item.key), plain):
            raise DamagedRowError("it does not bear the tenant's seal: somebody else wrote it, or has changed it")
        if plain.get("v") != FORMAT:
            raise DamagedRowError(f"it is written in format {plain.get('v')!r}, not {FORMAT}: another release wrote it")
        records: Sequence[Mapping[str, Any]] = plain["said"]
        return records

    def _seal_purpose(self, key: str) -> str:
        """Return the context of a commit's seal: moved to another thread or key, the seal is invalid."""
        return f"log {self.place[-1]} {key}"


def _row_start(row: LineageRow) -> Any:
    """Return model and first two parents of a row, with their positions: rows that share them have similar parents."""
    return row.model, *((parent, row.at + offset) for parent, offset in row.parents[:2])


def _remember(rows: dict[Any, LineageRow], row: LineageRow) -> None:
    rows.pop(_row_start(row), None)
    rows[_row_start(row)] = row
    if len(rows) > _REMEMBERED_ROWS:
        del rows[next(iter(rows))]


@dataclass(eq=False)
class _PendingWrite:
    ops: Sequence[PutOp]
    turn: Future[bool] = field(default_factory=Future)
    """Result True: the write is done. False: its caller becomes the leader."""
    error: Exception | None = None
    """Error of the store."""
    is_abandoned: bool = False
    """Whether its caller was cancelled."""

    def __post_init__(self) -> None:
        self.turn.set_running_or_notify_cancel()  # a cancelled caller must not cancel the future

    def end(self, error: Exception | None) -> None:
        self.error = error
        if not self.turn.done():
            self.turn.set_result(True)


class Commits:
    """Group commit of one store: concurrent writes become one transaction. Usable from any thread and event loop.

    node a   |ops|........|
    node b     |ops|......|           one batch: the first caller is the leader and writes all that waits
    node c         |ops|..........|   the next batch: the first waiting caller leads

    Args:
        write: Writes operations to the store, in one transaction if the store can.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._pending: list[_PendingWrite] = []
        self._has_leader = False
        self.count = 0
        """Number of commits so far."""

    def enqueue(self, ops: Sequence[PutOp]) -> Awaitable[None]:
        """Enqueue operations, and return an awaitable of their commit, to be awaited at once. Raises `StoreError`."""
        own = _PendingWrite(ops)
        with self._lock:
            self._pending.append(own)
            is_leader, self._has_leader = not self._has_leader, True
        return self._wait_committed(own, is_leader=is_leader)

    async def _wait_committed(self, own: _PendingWrite, *, is_leader: bool) -> None:
        if is_leader or not await self._wait_turn(own):
            _, cancelled = await run_to_end(self._lead())
            if cancelled is not None:
                raise cancelled
        if own.error is not None:
            raise own.error

    async def _wait_turn(self, own: _PendingWrite) -> bool:
        try:
            return await asyncio.wrap_future(own.turn)
        except asyncio.CancelledError:
            with self._lock:
                own.is_abandoned = True
            if own.turn.done() and not own.turn.result():
                self._hand_over()
            raise

    async def _lead(self) -> None:
        batch: list[_PendingWrite] = []
        try:
            await asyncio.sleep(0)  # lets nodes that end in the same iteration of the event loop join the batch
            with self._lock:
                batch, self._pending = self._pending, []
            await self._commit(batch)
        except BaseException:  # its event loop ends
            for pending in batch:
                if not pending.turn.done() or pending.error is None:
                    pending.end(StoreError("a commit of the run's lineage was broken off: run it again"))
            raise
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Make the first caller that still waits the leader; without one, abandoned writes wait for the next call."""
        with self._lock:
            following = next((pending for pending in self._pending if not pending.is_abandoned), None)
            self._has_leader = following is not None
        if following is not None:
            following.turn.set_result(False)

    async def _commit(self, batch: Sequence[_PendingWrite]) -> None:
        error: Exception | None = None
        try:
            await self._write([op for pending in batch for op in pending.ops])
            self.count += 1
        except Exception as raised:
            error = raised
        if error is not None and len(batch) > 1:
            for pending in batch:  # one by one: an error fails only its own write
                await self._commit([pending])
            return
        for pending in batch:
            pending.end(error)


def commits_of(store: BaseStore) -> Commits:
    """Return the group commit of a store: one object for all writers."""
    weak = ref(store)  # `_commits` holds the stores weakly: a strong reference in its value would keep them

    async def write(ops: Sequence[PutOp]) -> object:
        target = weak()
        assert target is not None, "whoever writes has it"
        return await run_store_ops(target, ops)

    return _commits.get(store) or _commits.setdefault(store, Commits(write))


async def read_items(store: BaseStore, namespace: tuple[str, ...]) -> list[SearchItem]:
    """Read all items of a namespace, ordered by key.

    One search with a growing limit, not pages: others write between pages, and PostgreSQL orders items of one
    transaction differently each time.
    """
    limit = _PAGE
    while True:
        [items] = await run_store_ops(store, [SearchOp(namespace, limit=limit)])
        if len(items) < limit:
            return sorted((item for item in items if item.namespace == namespace), key=lambda item: item.key)
        limit *= 8


async def run_store_ops(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
    """Run operations on a sync or async store, in this event loop or in a thread that may wait for it.

    Raises:
        StoreError: The store failed.
    """
    try:
        loop = getattr(store, "loop", None)  # LangGraph's async stores have one
        if is_blocked(loop):
            raise RuntimeError("a sync call waits in the event loop that the store answers in: await ainvoke there")
        if loop in (None, asyncio.get_running_loop()):
            try:
                return await store.abatch(ops)
            except NotImplementedError:  # a store that is sync only
                pass
        return await asyncio.to_thread(store.batch, ops)
    except Exception as error:
        await asyncio.to_thread(_roll_back, store)
        first = error.__context__ or error  # if the file is full, SQLite's store raises a second error, of its commit
        raise StoreError(
            f"the store {type(store).__name__} of the run's lineage has failed ({first!r}): nothing that was reported "
            "is lost; run it again when the store works"
        ) from error


def _roll_back(store: BaseStore) -> None:
    """Roll back SQLite's transaction, which a failed commit leaves open."""
    connection = getattr(store, "conn", None)
    if isinstance(connection, sqlite3.Connection) and connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.rollback()
