"""The lineage of one thread on one engine, for one call of a node: read where it is missing, written before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import DescribedMessage, Note
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.errors import HandleError
from choreo_agents.graph.durable.finding import lineage_store_of
from choreo_agents.graph.durable.thread_log import ReadLog, ThreadLog
from choreo_agents.kv.handle import MessageHandle

_REMEMBERED = "lineage"
_known: WeakKeyDictionary[BaseStore, WeakValueDictionary[tuple[str, ...], KnownLog]] = WeakKeyDictionary()
_lock = Lock()


@dataclass(eq=False)
class KnownLog:
    """What is known in this process of what a thread has written, whichever of its engines did. It goes when the last
    of these has forgotten the thread."""

    log: ThreadLog
    lock: Lock = field(default_factory=Lock)
    notes: dict[str, Note] = field(default_factory=dict)
    """By the messages' ids: all that was said of each."""
    answers: dict[str, str] = field(default_factory=dict)
    """The messages that answer calls, by the calls' memos."""

    async def read(self) -> ReadLog:
        """Know what is written, and nothing else."""
        found = await self.log.read()
        with self.lock:
            self.notes, self.answers = found.notes, found.answers
        return found

    def add(self, described: Iterable[DescribedMessage]) -> None:
        """Know more."""
        with self.lock:
            for _, note, memos in described:
                before = self.notes.get(note.id)
                self.notes[note.id] = note if before is None else before.merged(note)
                self.answers.update(dict.fromkeys(memos, note.id))

    def answering(self, call: str) -> dict[str, str]:
        """The messages that answer a call, by the memo of each that was asked so."""
        with self.lock:
            return {memo: each for memo, each in self.answers.items() if memo.rpartition(" ")[0] == call}


class RunLineage:
    """Every method raises `StoreError` if the store fails.

    Args:
        engine: Has the messages.
        scope: The thread's, on the engine.
        known: What the thread has written.
    """

    def __init__(self, engine: Engine, scope: Scope, known: KnownLog) -> None:
        self._engine, self._scope, self._known = engine, scope, known
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
            memo: Names the call.
            again: Whether it is asked all the same, and its answer takes the place of what it had.
        """
        self._asked = memo
        if again:
            return
        found = None if await self._known.log.is_known() else await self._known.read()
        missing = self._engine.lineage.recall(self._known.answering(memo), self._scope)
        if missing:
            await self._take_in(missing, found)

    async def commit(self, used: Iterable[MessageHandle], held: Iterable[MessageHandle]) -> None:
        """Write what messages are computed from, and all that they come from; return when it is committed. What KV
        there is of those that are used is kept, if the engine keeps any; that is not waited for.

        Args:
            used: What a call has read and made.
            held: What else the thread has, which may have come from another.
        """
        known = self._known
        if known.log.is_stale:
            await known.read()
        with known.lock:
            handles = [*used, *(handle for handle in held if handle.id not in known.notes)]
            thread = known.notes, known.answers
            described = [*self._engine.lineage.described(handles, self._scope, *thread, self._asked).values()]
        if not described:
            return
        await known.log.write(described)
        known.add(described)
        kv = self._engine.kv
        there = [each for each, tier in zip(handles, kv.tiers(handles), strict=True) if tier not in (None, "lineage")]
        with suppress(HandleError):  # released meanwhile: it is computed again
            kv.keep(there)

    async def _take_in(self, wanted: Sequence[str], found: ReadLog | None = None) -> None:
        """Have the engine know messages, and all others that answer calls of the thread: one of them is asked next."""
        found = found or await self._known.read()
        taken = [*wanted, *(each for each in {*found.answers.values()} if each in found.rows)]
        seen, waiting = {*taken}, [*taken]
        while waiting:
            made_of = _made_of(waiting.pop(), found)
            waiting += made_of - seen
            seen |= made_of
        rows = {each: found.rows[each] for each in seen if each in found.rows}
        await asyncio.to_thread(self._engine.lineage.look_for_kv, rows)
        refused = self._engine.lineage.take_in(taken, rows, found.notes, found.answers, self._scope)
        with self._known.lock:
            for message_id in seen - rows.keys():
                self._known.notes.pop(message_id, None)  # whoever commits it again writes its row
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
    known = remembered.get(_REMEMBERED)
    if known is None or known.log.store is not store:
        known = remembered[_REMEMBERED] = known_log(ThreadLog(store, engine, thread))
    return RunLineage(engine, scope, known)


def known_log(log: ThreadLog) -> KnownLog:
    """What this process knows of a log: the same for all of its engines."""
    with _lock:
        return _known.setdefault(log.store, WeakValueDictionary()).setdefault(log.place, KnownLog(log))
