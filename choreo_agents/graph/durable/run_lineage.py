"""The lineage of one thread on one engine, for one call of a node: read where it is missing, written before it ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import LineageRow, Note
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.errors import HandleError
from choreo_agents.graph.durable.finding import lineage_store_of
from choreo_agents.graph.durable.lineage_store import LineageStore
from choreo_agents.kv.handle import MessageHandle

_REMEMBERED = "lineage"


@dataclass(eq=False)
class ThreadNotes:
    """What is known here of what a thread has written. It goes when the thread is forgotten by the engine."""

    store: object
    lock: Lock = field(default_factory=Lock)
    notes: dict[str, Note] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """The messages that answer calls, by the calls' names and by what was asked."""
    is_read: bool = False

    def add(self, notes: Iterable[Note]) -> None:
        """Know more."""
        with self.lock:
            for note in notes:
                self.notes[note.id] = note
                for memo in note.memos:
                    self.answers[memo.rpartition(" ")[0]][memo] = note.id

    def outdated(self, notes: Sequence[Note]) -> list[Note]:
        """What stands of messages that answer a call no longer, since one of these does: as it is to stand now."""
        written = {note.id for note in notes}
        given = {memo: note.id for note in notes for memo in note.memos}
        before = {self.answers.get(memo.rpartition(" ")[0], {}).get(memo, each) for memo, each in given.items()}
        older = [self.notes[each] for each in before - written if each in self.notes]
        return [replace(note, memos=tuple(memo for memo in note.memos if memo not in given)) for note in older]


class RunLineage:
    """Every method raises `StoreError` if the store fails.

    Args:
        engine: Has the messages.
        store: Keeps their lineage.
        thread: The thread, by the name that it has in the store.
        scope: Its, on the engine.
        known: What it has written.
    """

    def __init__(self, engine: Engine, store: LineageStore, thread: str, scope: Scope, known: ThreadNotes) -> None:
        self._engine, self._store, self._scope, self._known = engine, store, scope, known
        self._thread = thread
        self.refused: dict[str, str] = {}
        """Why messages could not be taken in, by id."""

    async def restore(self, handles: Iterable[MessageHandle]) -> None:
        """Have the engine know messages again that it does not know: what cannot be stands in `refused`."""
        missing = self._engine.lineage.unknown(handles, self._scope)
        if missing:
            self._known.is_read = False  # another process may have written them
            await self._take_in([handle.id for handle in missing])

    def begin_anew(self) -> None:
        """The thread has said nothing: what was known of it, another process has forgotten."""
        with self._known.lock:
            self._known.notes.clear()
            self._known.answers.clear()
            self._known.is_read = False

    async def recall(self, memo: str) -> None:
        """Have it know what a call was answered before, if that was written."""
        await self._read()
        with self._known.lock:
            answers = [*self._known.answers.get(memo, {}).values()]
        missing = self._engine.lineage.unleased(answers, self._scope)
        if missing:
            await self._take_in(missing)

    async def commit(self, used: Iterable[MessageHandle], held: Iterable[MessageHandle]) -> None:
        """Write what messages are computed from, and all that they come from; return when it is committed. What KV
        there is of those that are used is kept, if the engine keeps any; that is not waited for.

        Args:
            used: What a call has read and made.
            held: What else the thread has, which may have come from another.
        """
        await self._read()
        known = self._known
        with known.lock:
            handles = [*used, *(handle for handle in held if handle.id not in known.notes)]
            described = self._engine.lineage.described(handles, self._scope, known.notes)
            if not described:
                return
            notes = [each.note for each in described.values()]
            outdated = known.outdated(notes)
            ops = self._store.writes(self._thread, described.values(), outdated)
            written = self._store.commits.enqueue(ops)
        await written
        known.add([*outdated, *notes])
        kv = self._engine.kv
        there = [each for each, tier in zip(handles, kv.tiers(handles), strict=True) if tier not in (None, "lineage")]
        with suppress(HandleError):  # released meanwhile: it is computed again
            kv.keep(there)

    async def _read(self) -> None:
        if not self._known.is_read:
            found = await self._store.notes(self._thread)
            known = self._known.notes
            self._known.add(known[note.id].merged(note) if note.id in known else note for note in found.values())
            self._known.is_read = True

    async def _take_in(self, wanted: Sequence[str]) -> None:
        await self._read()
        rows: dict[str, LineageRow] = {}
        waiting, seen = [*wanted], {*wanted}
        while waiting:
            found = await self._store.rows(waiting)
            rows |= found
            more = [each for message_id in waiting for each in self._made_of(message_id, found.get(message_id))]
            waiting = [each for each in dict.fromkeys(more) if each not in seen]
            seen |= {*waiting}
        notes = {message_id: self._known.notes[message_id] for message_id in seen if message_id in self._known.notes}
        await asyncio.to_thread(self._engine.lineage.look_for_kv, rows)
        refused = self._engine.lineage.take_in(wanted, rows, notes, self._scope)
        with self._known.lock:
            for message_id in seen - rows.keys():
                self._known.notes.pop(message_id, None)  # whoever commits it again writes its row
        self.refused |= {message_id: self._store.damaged.get(message_id, why) for message_id, why in refused.items()}

    def _made_of(self, message_id: str, row: LineageRow | None) -> list[str]:
        note = self._known.notes.get(message_id)
        told = [] if note is None else [*note.sources, *(thought for thought, _ in note.thoughts)]
        return [*told, *((parent for parent, _ in row.parents) if row is not None else ())]


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
    if known is None or known.store is not store:
        known = remembered[_REMEMBERED] = ThreadNotes(store)
    there = LineageStore(store, engine)
    return RunLineage(engine, there, there.thread(thread), scope, known)
