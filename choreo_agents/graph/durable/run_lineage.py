"""The lineage of one thread on one engine, for one call of a node: read where it is missing, written before it ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.engine.lineage import LineageRow, Note
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.errors import HandleError
from choreo_agents.graph.durable.finding import lineage_store_of
from choreo_agents.graph.durable.lineage_store import LineageStore, digest_of
from choreo_agents.kv.handle import MessageHandle

_REMEMBERED = "lineage"


@dataclass(eq=False)
class ThreadNotes:
    """What is known here of what a thread has written. It goes when the thread is forgotten by the engine."""

    store: object
    lock: Lock = field(default_factory=Lock)
    notes: dict[str, Note] = field(default_factory=dict)
    """By the messages' ids: all that was said of each."""
    digests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """What each of them stands under, in parts."""
    answers: dict[str, str] = field(default_factory=dict)
    """The messages that answer calls, by the calls' memos."""
    calls: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The memos of each call, by the call's name: one for each that was asked."""
    is_read: bool = False

    def add(self, notes: Iterable[Note], answers: Mapping[str, str]) -> None:
        """Know more."""
        with self.lock:
            for note in notes:
                before = self.notes.get(note.id)
                self.notes[note.id] = note if before is None else note.merged(before)
                self.digests[note.id].add(digest_of(note))
            self.answers.update(answers)
            for memo in answers:
                self.calls[memo.rpartition(" ")[0]].add(memo)

    def replacing(self, notes: Iterable[Note]) -> dict[str, set[str]]:
        """The digests of what these say again, by the messages' ids; called with the lock."""
        return {note.id: {*self.digests[note.id]} for note in notes if note.id in self.digests}

    def answering(self, ids: Collection[str]) -> dict[str, str]:
        """Those of the answers that are among these messages."""
        with self.lock:
            return {memo: message_id for memo, message_id in self.answers.items() if message_id in ids}

    def clear(self) -> None:
        """Know nothing, until it is read again."""
        with self.lock:
            for known in (self.notes, self.digests, self.answers, self.calls):
                known.clear()
            self.is_read = False


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
        self._known.clear()

    async def recall(self, memo: str) -> None:
        """Have it know what a call was answered before, if that was written."""
        await self._read()
        with self._known.lock:
            answers = [self._known.answers[each] for each in self._known.calls.get(memo, ())]
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
            described = self._engine.lineage.described(handles, self._scope, known.notes, known.answers)
            if not described:
                return
            notes = [each.note for each in described.values()]
            ops = self._store.writes(self._thread, described.values(), known.replacing(notes))
            written = self._store.commits.enqueue(ops)
        await written
        known.add(notes, {memo: each.note.id for each in described.values() for memo in each.memos})
        kv = self._engine.kv
        there = [each for each, tier in zip(handles, kv.tiers(handles), strict=True) if tier not in (None, "lineage")]
        with suppress(HandleError):  # released meanwhile: it is computed again
            kv.keep(there)

    async def _read(self) -> None:
        if not self._known.is_read:
            notes, answers = await self._store.notes(self._thread), await self._store.answers(self._thread)
            self._known.add(notes, answers)
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
        answers = self._known.answering(seen)
        refused = self._engine.lineage.take_in(wanted, rows, notes, answers, self._scope)
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
