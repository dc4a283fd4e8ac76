"""The log of a thread in a LangGraph store: from what its messages are computed, and which calls they answer.

    ("choreo", tenant, thread)    NUMBER ID    what one commit has written, under the tenant's seal

Tenants and threads are named by digests under the tenant's key. A log has all that its thread's messages come from,
what other threads have, too, included: it is deleted as a whole, and ends by the store's own TTL. A node reads it where
messages are missing, and has written to it before it ends.
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
from choreo_agents.graph.sync_bridge import stands_still, to_its_end
from choreo_agents.kv.handle import MessageHandle

ROOT = "choreo"
FORMAT = 3
"""Of what a commit writes; what was written in another is not read."""
_SEAL = "seal"
_ID = "\x1f"
"""Stands for a thread's id, which may name a person, in the names of its calls."""
_COMPARED = 4
"""How many rows that were written last may be named in the place of a row's parents, beside the last ..."""
_REMEMBERED_ROWS = 1024
"""... that began as it does: so many are remembered."""
_PAGE = 4096
_AT_ONCE = 512
"""Deletions in one operation of the store; SQLite takes no more than so many parameters."""
_REMEMBERED = "lineage"
_commits: WeakKeyDictionary[BaseStore, Commits] = WeakKeyDictionary()
_known: WeakKeyDictionary[BaseStore, WeakValueDictionary[tuple[str, ...], ThreadLog]] = WeakKeyDictionary()
_lock = threading.Lock()
Write = Callable[[Sequence[PutOp]], Awaitable[object]]


class RunLineage:
    """The lineage of one thread on one engine, for one call of a node: read where it is missing, written before it
    ends. Every method raises `StoreError` if the store fails.

    Args:
        engine: Has the messages.
        scope: The thread's, on the engine.
        log: The thread's.
    """

    def __init__(self, engine: Engine, scope: Scope, log: ThreadLog) -> None:
        self._engine, self._scope, self._log = engine, scope, log
        self.refused: dict[str, str] = {}
        """Why messages could not be taken in, by id."""
        self._asked: str | None = None
        """The call that was made last."""

    async def restore(self, handles: Iterable[MessageHandle]) -> None:
        """Have the engine know messages again that it does not know: what cannot be stands in `refused`."""
        missing = self._engine.lineage.unknown(handles, self._scope)
        if missing:
            await self._take_in([handle.id for handle in missing])

    async def recall(self, memo: str, *, again: bool) -> None:
        """Have the engine know what a call was answered before, if that was written, by whichever process.

        Args:
            idempotency_key: Names the call.
            again: Whether it is asked all the same, and its answer takes the place of what it had.
        """
        self._asked = memo
        if again:
            return
        found = None if await self._log.is_known() else await self._log.read()
        missing = self._engine.lineage.recall(self._log.answering(memo), self._scope)
        if missing:
            await self._take_in(missing, found)

    async def commit(self, used: Iterable[MessageHandle], held: Iterable[MessageHandle]) -> None:
        """Write what messages are computed from, and all that they come from; return when it is committed. What KV
        there is of those that are used is kept, if the engine keeps any; that is not waited for.

        Args:
            used: What a call has read and made.
            held: What else the thread has, which may have come from another.
        """
        log = self._log
        if log.is_stale:
            await log.read()
        with log.lock:
            handles = [*used, *(handle for handle in held if handle.id not in log.notes)]
            described = self._engine.lineage.described(handles, self._scope, log.notes, log.answers, self._asked)
        if not described:
            return
        await log.write(described)
        kv = self._engine.kv
        there = [each for each, tier in zip(handles, kv.tiers(handles), strict=True) if tier not in (None, "lineage")]
        with suppress(HandleError):  # released meanwhile: it is computed again
            kv.persist(there)

    async def _take_in(self, wanted: Sequence[str], found: ReadLog | None = None) -> None:
        """Have the engine know messages, and all others that answer calls of the thread: one of them is asked next."""
        found = found or await self._log.read()
        taken = [*wanted, *(each for each in {*found.answers.values()} if each in found.rows)]
        seen, waiting = {*taken}, [*taken]
        while waiting:
            made_of = _made_of(waiting.pop(), found)
            waiting += made_of - seen
            seen |= made_of
        await asyncio.to_thread(self._engine.lineage.look_for_kv, seen & found.rows.keys())
        refused = self._engine.lineage.take_in(taken, found, self._scope)
        with self._log.lock:
            for message_id in seen - found.rows.keys():
                self._log.notes.pop(message_id, None)  # whoever commits it again writes its row
        why = (
            "" if found.damaged is None else f"; something that the thread has written is not believed: {found.damaged}"
        )
        self.refused |= {each: f"{refused[each]}{why}" for each in wanted if each in refused}


def _made_of(message_id: str, found: ReadLog) -> set[str]:
    note, row = found.notes.get(message_id), found.rows.get(message_id)
    told = set() if note is None else {*note.sources, *(thought for thought, _ in note.thoughts)}
    return told | (set() if row is None else {parent for parent, _ in row.parents})


async def lineage_of(
    engine: Engine, config: RunnableConfig, thread: object, scope: Scope, remembered: dict[str, Any]
) -> RunLineage | None:
    """The lineage of the thread that a node runs in; None: nobody keeps it. Raises `StoreError` if that cannot be read.

    Args:
        engine: The node's.
        config: The node's.
        thread: That keeps what is said.
        scope: Its, on the engine.
        remembered: What is remembered of it there.
    """
    store = await lineage_store_of(config) if isinstance(thread, str) and engine.lineage.seals.salted else None
    if store is None or not isinstance(thread, str):
        return None
    log = remembered.get(_REMEMBERED)
    if log is None or log.store is not store:
        log = remembered[_REMEMBERED] = known_log(ThreadLog(store, engine, thread))
    return RunLineage(engine, scope, log)


def known_log(log: ThreadLog) -> ThreadLog:
    """A log as this process knows it: the same for all of its engines, until the last has forgotten the thread."""
    with _lock:
        return _known.setdefault(log.store, WeakValueDictionary()).setdefault(log.place, log)


class ThreadLog:
    """Of one thread, in one store, and what is known of it in this process, whichever of its engines has written it.
    Its methods raise `StoreError` if the store fails.

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
        self.lock = threading.Lock()
        self.notes: dict[str, Note] = {}
        """By the messages' ids: all that was said of each."""
        self.answers: dict[str, str] = {}
        """The messages that answer calls, by the calls' idempotency keys."""

    @property
    def _ttl_minutes(self) -> float | None:
        return (self.store.ttl_config or {}).get("default_ttl") if self.store.supports_ttl else None

    @property
    def is_stale(self) -> bool:
        """Whether it is to be read again, so that the store's TTL begins anew for all of it."""
        return self._ttl_minutes is not None and time.monotonic() - self._read_s > self._ttl_minutes * 30

    async def write(self, described: Sequence[DescribedMessage]) -> None:
        """Write messages, and return when they are committed; what is enqueued by this call is in order."""
        said, rows = list[dict[str, Any]](), {**self._rows}
        for row, note, memos in described:
            told: dict[str, Any] = {}
            if row is not None:
                others = [*reversed(rows.values())][:_COMPARED]
                told["row"] = row.plain([rows[_begins(row)], *others] if _begins(row) in rows else others)
                _remember(rows, row)
            calls = [memo.replace(self._thread, _ID) for memo in memos]
            said.append({**told, "note": note.plain(), **({"answers": calls} if calls else {})})
        self._last = max(self._last + 1, time.time_ns())
        key, plain = f"{self._last:020} {uuid.uuid4().hex[:12]}", {"v": FORMAT, "said": said}
        value = {**plain, _SEAL: self._seals.seal(self._kind(key), plain)}
        # No part of a store's index: nobody searches it.
        await self.commits.enqueue([PutOp(self.place, key, value, index=False, ttl=self._ttl_minutes)])
        self._keys.add(key)
        with self.lock:
            for row, note, memos in described:
                if row is not None:
                    _remember(self._rows, row)
                before = self.notes.get(note.id)
                self.notes[note.id] = note if before is None else before.merged(note)
                self.answers.update(dict.fromkeys(memos, note.id))

    async def is_known(self) -> bool:
        """Whether there is what was read and written here, and nothing else: neither has another process written since,
        nor was it forgotten, nor has something come to its end."""
        count = len(self._keys)
        [found] = await run_store_ops(
            self.store, [SearchOp(self.place, limit=2, offset=max(count - 1, 0), refresh_ttl=False)]
        )
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
        with self.lock:
            self.notes, self.answers = found.notes, found.answers
        return found

    def answering(self, call: str) -> dict[str, str]:
        """The messages that answer a call, by the idempotency key of each that was asked so."""
        with self.lock:
            return {memo: each for memo, each in self.answers.items() if memo.rpartition(" ")[0] == call}

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
        found.notes[note.id] = note if before is None else before.merged(note)
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
    if len(rows) > _REMEMBERED_ROWS:
        del rows[next(iter(rows))]


@dataclass(eq=False)
class _Waiting:
    ops: Sequence[PutOp]
    turn: Future[bool] = field(default_factory=Future)
    """True: it is over. False: its caller leads now."""
    error: Exception | None = None
    """What the store raised."""
    is_left: bool = False
    """Whether its caller waits no longer."""

    def __post_init__(self) -> None:
        self.turn.set_running_or_notify_cancel()  # who waits for it no longer does not take it back

    def end(self, error: Exception | None) -> None:
        self.error = error
        if not self.turn.done():
            self.turn.set_result(True)


class Commits:
    """Of one store: writes of nodes that end together are one commit. May be used from any thread and event loop.

    node a   |ops|........|
    node b     |ops|......|           one batch: who came first has the store write all that waits
    node c         |ops|..........|   the next: the first of those who wait leads

    Args:
        write: Has the store write operations, all in one transaction if it can.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._led = False
        self.count = 0
        """Commits so far."""

    def enqueue(self, ops: Sequence[PutOp]) -> Awaitable[None]:
        """Have operations written, behind all that was enqueued before. Await what is returned at once: it raises what
        the store raised."""
        own = _Waiting(ops)
        with self._lock:
            self._waiting.append(own)
            leads, self._led = not self._led, True
        return self._committed(own, leads=leads)

    async def _committed(self, own: _Waiting, *, leads: bool) -> None:
        if leads or not await self._turn(own):
            _, cancelled = await to_its_end(self._lead())
            if cancelled is not None:
                raise cancelled
        if own.error is not None:
            raise own.error

    async def _turn(self, own: _Waiting) -> bool:
        try:
            return await asyncio.wrap_future(own.turn)
        except asyncio.CancelledError:
            with self._lock:
                own.is_left = True
            if own.turn.done() and not own.turn.result():
                self._hand_over()
            raise

    async def _lead(self) -> None:
        together: list[_Waiting] = []
        try:
            await asyncio.sleep(0)  # those that end in the same turn of the event loop come in
            with self._lock:
                together, self._waiting = self._waiting, []
            await self._commit(together)
        except BaseException:  # its event loop ends
            for each in together:
                if not each.turn.done() or each.error is None:
                    each.end(StoreError("a commit of the run's lineage was broken off: run it again"))
            raise
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the first who waits still lead; what only others wait for is written with what comes next."""
        with self._lock:
            following = next((each for each in self._waiting if not each.is_left), None)
            self._led = following is not None
        if following is not None:
            following.turn.set_result(False)

    async def _commit(self, together: Sequence[_Waiting]) -> None:
        error: Exception | None = None
        try:
            await self._write([op for each in together for op in each.ops])
            self.count += 1
        except Exception as raised:
            error = raised
        if error is not None and len(together) > 1:
            for each in together:  # what cannot be written of one is not the others' fault
                await self._commit([each])
            return
        for each in together:
            each.end(error)


def commits_of(store: BaseStore) -> Commits:
    """Through which all that is written to a store goes: the same for all who write there."""
    weak = ref(store)

    async def write(ops: Sequence[PutOp]) -> object:
        known = weak()
        assert known is not None, "whoever writes has it"
        return await run_store_ops(known, ops)

    return _commits.get(store) or _commits.setdefault(store, Commits(write))


async def everything(store: BaseStore, place: tuple[str, ...]) -> list[SearchItem]:
    """Read all that stands in a place, in order.

    In one answer: between two pages others write, and of what was written together PostgreSQL shows any order, each
    time another.
    """
    limit = _PAGE
    while True:
        [found] = await run_store_ops(store, [SearchOp(place, limit=limit)])
        if len(found) < limit:
            return sorted((item for item in found if item.namespace == place), key=lambda item: item.key)
        limit *= 8


async def run_store_ops(store: BaseStore, ops: Sequence[Op]) -> list[Any]:
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
