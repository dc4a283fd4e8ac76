"""Log of a thread in a LangGraph store: the lineage of its messages, and which calls they answer.

    ("choreo", tenant, thread)    NUMBER ID    an entry: the messages of one commit, under the tenant's seal

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore, Op, PutOp, SearchItem, SearchOp
from pydantic import TypeAdapter

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import LoggedMessage, ReadLog
from choreo_agents.engine.messages.message import Scope
from choreo_agents.errors import HandleError, StoreError
from choreo_agents.graph.durable.finding import lineage_store_of
from choreo_agents.graph.sync_bridge import is_blocked, run_to_end
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey

ROOT = "choreo"
FORMAT = 4
"""Format of entries; those of another format are not read."""
_SEAL = "seal"
_ID = "\x1f"
"""Placeholder for the thread's id, which may name a person, in idempotency keys."""
_COMPARED = 4
"""Number of recent messages that a message may refer to instead of listing its parents, beside the last ..."""
_REMEMBERED_KEYS = 1024
"""... one whose view began as its does; so many of those are remembered."""
_PAGE = 4096
"""Items that the first search asks for."""
_AT_ONCE = 512
"""Deletions in one operation of the store: SQLite bounds the number of parameters."""
_REMEMBERED = "lineage"
_known: WeakKeyDictionary[BaseStore, WeakValueDictionary[tuple[str, ...], ThreadLog]] = WeakKeyDictionary()
_commits: WeakKeyDictionary[BaseStore, GroupCommit] = WeakKeyDictionary()
_lock = threading.Lock()
_RECORD, _KEY = TypeAdapter(LoggedMessage), TypeAdapter(KVKey)
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an entry that is not of its format."""


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
            handles = [*used, *(handle for handle in owned if handle.id not in log.known.messages)]
            described = self._engine.lineage.described(handles, self._scope, log.known, self._last_call)
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
        taken = [*missing, *(answer for answer in {*log.answers.values()} if answer in log.keys)]
        await asyncio.to_thread(self._engine.lineage.look_for_kv, log.keys)
        refused = self._engine.lineage.import_messages(taken, log, self._scope)
        why = "" if log.damaged is None else f"; a record of the thread was rejected: {log.damaged}"
        self.refused |= {message_id: f"{refused[message_id]}{why}" for message_id in missing if message_id in refused}


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
        with _lock:
            self._commits = _commits.setdefault(store, GroupCommit())
        self._keys: dict[Any, KVKey] = {}
        """Last message by the beginning of its view, the latest last."""
        self._entries: set[str] = set()
        """Keys of all known entries."""
        self._last = 0
        """Number of the last entry, from the clock: later entries have larger ones, in every process."""
        self._read_s = 0.0
        """`time.monotonic` of the last read."""
        self.lock = threading.Lock()
        """Guards `known`, which several engines use from their threads."""
        self.known = ReadLog()
        """Everything that is known to be written, without keys."""

    @property
    def _ttl_minutes(self) -> float | None:
        return (self.store.ttl_config or {}).get("default_ttl") if self.store.supports_ttl else None

    @property
    def is_stale(self) -> bool:
        """True if half of the TTL has passed since the last read, which refreshes it for all items."""
        return self._ttl_minutes is not None and time.monotonic() - self._read_s > self._ttl_minutes * 30

    async def write(self, records: Sequence[LoggedMessage]) -> None:
        """Write records as one entry, and return when it is committed, even if the caller is cancelled meanwhile: an
        entry that came later would survive the thread's deletion."""
        keys, packed = {**self._keys}, list[dict[str, Any]]()
        for record in records:
            packed.append(self._packed(record, keys))
            _remember(keys, record.key)
        self._last = max(self._last + 1, time.time_ns())
        name, plain = f"{self._last:020} {uuid.uuid4().hex[:12]}", {"v": FORMAT, "messages": packed}
        value = {**plain, _SEAL: self._seals.seal(self._seal_purpose(name), plain)}
        # Not in the store's search index: items are sealed, and read by namespace only.
        entry = PutOp(self.place, name, value, index=False, ttl=self._ttl_minutes)
        _, cancelled = await run_to_end(self._commits.write(self.store, entry))
        self._entries.add(name)
        with self.lock:
            for record in records:
                _remember(self._keys, record.key)
                self.known.add(replace(record, key=None))
        if cancelled is not None:
            raise cancelled

    async def is_known(self) -> bool:
        """Return whether the store has exactly the known entries: no other process wrote, deleted, and none expired.

        Two items suffice: the last known one is there at its offset, and nothing after it.
        """
        count = len(self._entries)
        search = SearchOp(self.place, limit=2, offset=max(count - 1, 0), refresh_ttl=False)
        [items] = await run_store_ops(self.store, [search])
        return [item.key in self._entries for item in items] == [True] * min(count, 1)

    async def read(self) -> ReadLog:
        """Read the whole log. Items that were tampered with, or belong to another thread, are skipped."""
        content, began_s = ReadLog(), time.monotonic()
        items = await read_items(self.store, self.place)
        self._entries, self._read_s = {item.key for item in items}, began_s
        self._keys.clear()
        for item in items:
            try:
                self._last = max(self._last, int(item.key.split()[0]))
                for plain in self._unseal(item):
                    record = self._unpacked(plain, content.keys)
                    content.add(record)
                    _remember(self._keys, record.key)
            except _MALFORMED as error:
                content.damaged = str(error) if isinstance(error, ValueError) else f"it is damaged: {error!r}"
        # A message whose key is lost is unknown: its next commit writes the key again.
        messages = {name: record for name, record in content.messages.items() if name in content.keys}
        with self.lock:
            self.known = ReadLog(messages=messages, answers={**content.answers})
        return content

    def answering(self, call: str) -> dict[str, str]:
        """Return the ids of a call's answers, by their idempotency keys: each is the call's key and one more part."""
        with self.lock:
            answers = self.known.answers.items()
            return {key: message_id for key, message_id in answers if key.rpartition(" ")[0] == call}

    async def delete(self, discard: Callable[[Sequence[str]], None]) -> None:
        """Delete the log, the last entry first, so that an interrupted deletion leaves a valid log.

        Args:
            discard: Called before with the ids of its messages, to remove their files.
        """
        await self._commits.flush()  # writes whose callers' event loops have ended would survive the deletion
        items, ids = await read_items(self.store, self.place), dict[str, None]()
        for item in items:
            with suppress(*_MALFORMED):
                ids |= {plain["id"]: None for plain in self._unseal(item)}
        discard([*ids])
        for start in range(0, len(items), _AT_ONCE):
            batch = [*reversed(items)][start : start + _AT_ONCE]
            await run_store_ops(self.store, [PutOp(self.place, item.key, None) for item in batch])

    def _packed(self, record: LoggedMessage, known: dict[Any, KVKey]) -> dict[str, Any]:
        """Return a record as JSON-plain values, without defaults and the thread's id.

        A prefix of parents that another message also has is replaced by a reference to that: each message of a
        conversation reads what the one before has read.

        Args:
            record: The record.
            known: Last messages by the beginning of their views, the latest last; the reader will know them.
        """
        answers = tuple(call.replace(self._thread, _ID) for call in record.answers)
        plain: dict[str, Any] = _RECORD.dump_python(
            replace(record, key=None, answers=answers), mode="json", exclude_defaults=True
        )
        if (key := record.key) is not None:
            own, shared, like = _placed_parents(key), 0, ""
            similar = [known[start]] if (start := _view_start(key)) in known else []
            for other in [*similar, *[*reversed(known.values())][:_COMPARED]]:
                if (count := _count_common(own, _placed_parents(other))) > shared:
                    shared, like = count, other.id
            plain |= {"model": key.model, "tokens": [*key.tokens], "at": key.native_offset}
            plain["parents"] = [[*parent] for parent in own[shared:]]
            plain |= {"like": [like, shared]} if shared else {}
        return plain

    def _unpacked(self, plain: Mapping[str, Any], known: Mapping[str, KVKey]) -> LoggedMessage:
        """Return the record that `_packed` wrote; raises one of `_MALFORMED` if it is another, or refers to an unknown
        message.

        Args:
            plain: Its values.
            known: All earlier messages by id.
        """
        key: KVKey | None = None
        if "model" in plain:
            (like, shared), at = plain.get("like", ("", 0)), plain["at"]
            if shared and like not in known:
                raise ValueError(f"it refers to {like}, which is not in the store")
            own = _KEY.validate_python({**plain, "native_offset": at})
            if not own.tokens:
                raise ValueError(f"{own.id} has no tokens")
            placed = [*(_placed_parents(known[like])[:shared] if shared else ()), *own.parents]
            key = replace(own, parents=tuple((parent, position - at) for parent, position in placed))
        record = _RECORD.validate_python(plain)
        return replace(record, key=key, answers=tuple(call.replace(_ID, self._thread) for call in record.answers))

    def _unseal(self, item: SearchItem) -> Sequence[Mapping[str, Any]]:
        value: Any = item.value
        if not isinstance(value, Mapping):
            raise ValueError(f"it is not a JSON object, but {type(value).__name__}")
        plain = {name: member for name, member in value.items() if name != _SEAL}
        if not self._seals.holds(value.get(_SEAL), self._seal_purpose(item.key), plain):
            raise ValueError("its signature is not the tenant's: it was written by somebody else, or changed")
        if plain.get("v") != FORMAT:
            raise ValueError(f"it has format {plain.get('v')!r}, not {FORMAT}: another version wrote it")
        messages: Sequence[Mapping[str, Any]] = plain["messages"]
        return messages

    def _seal_purpose(self, key: str) -> str:
        """Return the context of an entry's seal: moved to another thread or key, the seal is invalid."""
        return f"log {self.place[-1]} {key}"


def _placed_parents(key: KVKey) -> list[tuple[str, int]]:
    """Return a message's parents with the positions at which it has read them."""
    return [(parent, key.native_offset + offset) for parent, offset in key.parents]


def _view_start(key: KVKey) -> Any:
    """Return model and first two parents of a message, with their positions: those that share them have similar
    parents."""
    return key.model, *_placed_parents(key)[:2]


def _remember(keys: dict[Any, KVKey], key: KVKey | None) -> None:
    if key is None:
        return
    keys.pop(_view_start(key), None)
    keys[_view_start(key)] = key
    if len(keys) > _REMEMBERED_KEYS:
        del keys[next(iter(keys))]


def _count_common(first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@dataclass(eq=False)
class _Batch:
    ops: list[PutOp] = field(default_factory=list)
    errors: Future[list[StoreError | None]] = field(default_factory=Future)
    """Errors by operation, when all have been tried."""

    def __post_init__(self) -> None:
        self.errors.set_running_or_notify_cancel()  # a cancelled caller must not cancel it


class GroupCommit:
    """Commits concurrent writes to one store in one transaction. Usable from any thread and event loop.

    node a   |write|........|
    node b     |write|......|        one batch: its first caller writes it when the batch before is written
    node c        |write|.......|    the next batch
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: _Batch | None = None
        """Batch that is not written yet, which may grow."""
        self._batches: list[_Batch] = []
        """Batches until they are written: then they are dropped, as they hold words, and their errors the store."""

    async def write(self, store: BaseStore, op: PutOp) -> None:
        """Write, and return when it is committed. Raises `StoreError`."""
        with self._lock:
            batch, before = self._open, self._batches[-1] if self._batches else None
            is_first = batch is None
            if batch is None:
                batch = self._open = _Batch()
                self._batches.append(batch)
            number = len(batch.ops)
            batch.ops.append(op)
        if is_first:
            await self._write_batch(store, batch, before)
        error = (await asyncio.wrap_future(batch.errors))[number]
        if error is not None:
            raise error

    async def flush(self) -> None:
        """Return when everything is written that callers, in any event loop, have asked for before."""
        with self._lock:
            batches = [*self._batches]
        for batch in batches:
            await asyncio.wrap_future(batch.errors)

    async def _write_batch(self, store: BaseStore, batch: _Batch, before: _Batch | None) -> None:
        errors: list[StoreError | None] = []
        try:
            # At least one iteration of the event loop: nodes that end in the same one join the batch.
            await (asyncio.sleep(0) if before is None else asyncio.wrap_future(before.errors))
            with self._lock:
                self._open = None
            errors = await _try_ops(store, batch.ops)
        finally:  # also if its event loop ends
            with self._lock:
                self._open = None if self._open is batch else self._open
                self._batches.remove(batch)
            broken = StoreError("writing the run's lineage was interrupted: run it again")
            batch.errors.set_result(errors or [broken] * len(batch.ops))


async def _try_ops(store: BaseStore, ops: Sequence[PutOp]) -> list[StoreError | None]:
    """Write all operations at once or, if that fails, one by one: an error fails only its own."""
    try:
        await run_store_ops(store, ops)
    except StoreError as error:
        if len(ops) > 1:
            return [error for op in ops for error in await _try_ops(store, [op])]
        return [error]
    return [None] * len(ops)


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
            raise RuntimeError("a sync call blocks the event loop of the store: use await ainvoke() there")
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
            f"the store {type(store).__name__} of the run's lineage failed ({first!r}): nothing reported before is "
            "lost; run again when the store works"
        ) from error


def _roll_back(store: BaseStore) -> None:
    """Roll back SQLite's transaction, which a failed commit leaves open."""
    connection = getattr(store, "conn", None)
    if isinstance(connection, sqlite3.Connection):
        # Under the store's lock: another caller's transaction may be open.
        lock = getattr(store, "lock", None)
        with lock if isinstance(lock, AbstractContextManager) else nullcontext(), suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.rollback()
