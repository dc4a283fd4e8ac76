"""Whether a store of lineage is whole: every row, note and holder, and what each of them needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langgraph.store.base import BaseStore, GetOp, Op, SearchOp

from choreo_agents.engine.lineage import FORMAT, Answered, DamagedRowError, LineageRow, Note, SealedRows
from choreo_agents.graph.durable.lineage_store import (
    answers_of,
    asked,
    holders_of,
    leaving_of,
    notes_of,
    require_own_place,
    rows_of,
)
from choreo_agents.graph.durable.upkeep.contents import OnProgress, TenantContents, contents_of, message_of
from choreo_agents.graph.durable.upkeep.listing import StoredEntry
from choreo_agents.graph.sync_bridge import run_coroutine

FindingKind = Literal[
    "damaged row",
    "damaged note",
    "damaged answer",
    "damaged holder",
    "another format",
    "unknown entry",
    "missing parent",
    "note without row",
    "note without holder",
    "holder without row",
    "holder without note",
    "answer without note",
    "row without holder",
    "row on its way out",
]
FINDINGS: Mapping[FindingKind, str] = {
    "damaged row": "its reader passes it over, and encodes the message's words again",
    "damaged note": "who said the message, and what it answers, is not known from the store",
    "damaged answer": "the call is asked again if LangGraph goes back to it",
    "damaged holder": "it counts as one that is whole",
    "another format": "another release has written it, and no other reads it",
    "unknown entry": "no release of ours writes there",
    "missing parent": "the message's words are encoded again when they are read",
    "note without row": "the message's words are encoded again when they are read",
    "note without holder": "a thread was not forgotten to its end: forget it again",
    "holder without row": "the message's words are encoded again when they are read",
    "holder without note": "nobody needs it: compact deletes it",
    "answer without note": "its thread says nothing: compact deletes it",
    "row without holder": "nobody needs it: compact deletes it",
    "row on its way out": "a deletion was broken off: compact, or any forgetting, ends it",
}
"""What each kind of finding means for who reads the store."""
_AT_ONCE = 128
"""Doubts in one question."""


@dataclass(frozen=True)
class StoreFinding:
    """Something that is not as it is written. Tenants and threads have the names that they have in the store."""

    what: FindingKind
    tenant: str
    id: str
    """Of the message."""
    thread: str = ""
    """Empty: it is no thread's."""
    why: str = ""


@dataclass(frozen=True)
class StoreReport:
    """What was read, and what was found."""

    tenants: int
    threads: int
    rows: int
    notes: int
    holders: int
    sealed: int
    """Rows and notes whose seals were checked, and hold."""
    findings: tuple[StoreFinding, ...]

    def counts(self) -> dict[FindingKind, int]:
        """How many there are of each kind that was found."""
        counted = Counter(finding.what for finding in self.findings)
        return {kind: counted[kind] for kind in FINDINGS if counted[kind]}


class _Doubt:
    """That one thing is there while another is not.

    Args:
        finding: What that is.
        there: Finds the one.
        gone: Would find the other.
    """

    def __init__(self, finding: StoreFinding, there: Op, *gone: Op) -> None:
        self.finding, self.ops = finding, (there, *gone)

    @staticmethod
    def holds(answers: Sequence[Any]) -> bool:
        """Whether it is so, by what the store answers."""
        return bool(answers[0]) and not any(answers[1:])


async def acheck_store(
    store: BaseStore, *, salts: Sequence[str] = (), on_progress: OnProgress = lambda done: None
) -> StoreReport:
    """Read a store of lineage from end to end. Runs may write to it meanwhile: what seems to be missing is looked for
    again before it is called so.

    Args:
        store: LangGraph's.
        salts: Of tenants whose seals are checked as well.
        on_progress: See `OnProgress`.

    Raises:
        StoreError: The store has failed.
    """
    reading = _Reading(dict(SealedRows.of(salt) for salt in salts))
    found = await contents_of(store, reading.take, on_progress)
    doubts = [doubt for name, tenant in found.items() for doubt in _doubts(name, tenant)]
    findings = [*reading.findings, *[each async for each in _confirmed(store, doubts)]]
    order = [*FINDINGS]
    return StoreReport(
        tenants=len(found),
        threads=sum(len(tenant.notes) for tenant in found.values()),
        rows=sum(len(tenant.rows) for tenant in found.values()),
        notes=sum(len(noted) for tenant in found.values() for noted in tenant.notes.values()),
        holders=sum(1 for tenant in found.values() for _ in tenant.held()),
        sealed=reading.sealed,
        findings=tuple(sorted(findings, key=lambda each: (order.index(each.what), each.tenant, each.thread, each.id))),
    )


def check_store(
    store: BaseStore, *, salts: Sequence[str] = (), on_progress: OnProgress = lambda done: None
) -> StoreReport:
    """See `acheck_store`."""
    return run_coroutine(acheck_store(store, salts=salts, on_progress=on_progress))


class _Reading:
    """Reads every value by itself.

    Args:
        sealed: By tenant, where a seal can be checked.
    """

    def __init__(self, sealed: Mapping[str, SealedRows]) -> None:
        self._by_tenant = sealed
        self.findings: list[StoreFinding] = []
        self.sealed = 0

    def take(self, entry: StoredEntry, tenant: TenantContents | None) -> None:
        """Read one, and note whose parents it needs."""
        _, kind, name, thread = (*entry.namespace, "", "", "")[:4]
        if tenant is None:
            why = f"it stands in {'.'.join(entry.namespace)!r}"
            self.findings.append(StoreFinding("unknown entry", name, entry.key, thread, why))
            return
        message_id, thread = message_of(entry), entry.key if kind == "holders" else thread
        if entry.value is not None and entry.value.get("v") != FORMAT:
            why = f"format {entry.value.get('v')!r}, not {FORMAT}"
            self.findings.append(StoreFinding("another format", name, message_id, thread, why))
            return
        try:
            parents = self._read(kind, name, thread, entry)
        except DamagedRowError as error:
            damaged: dict[str, FindingKind] = {
                "notes": "damaged note",
                "answers": "damaged answer",
                "holders": "damaged holder",
            }
            what = damaged.get(kind, "damaged row")
            self.findings.append(StoreFinding(what, name, message_id, thread, str(error)))
            return
        if kind == "rows":
            tenant.rows[message_id] = parents

    def _read(self, kind: str, tenant: str, thread: str, entry: StoredEntry) -> tuple[str, ...]:
        """The parents of a row; raises `DamagedRowError`."""
        value, sealed = entry.value, self._by_tenant.get(tenant)
        if value is None:
            raise DamagedRowError("it is no object of JSON")
        if kind == "holders":
            return ()
        found: LineageRow | Note | Answered
        if kind == "answers":
            found = Answered.read(value) if sealed is None else sealed.read_answer(thread, value)
            own = entry.key if sealed is None else sealed.call(thread, found.memo)
        elif kind == "notes":
            found = Note.read(value) if sealed is None else sealed.read_note(thread, value)
            own = found.id
        else:
            found = LineageRow.read(value) if sealed is None else sealed.read_row(value)
            own = found.id
        require_own_place(message_of(entry), own)
        self.sealed += sealed is not None
        return tuple(parent for parent, _ in found.parents) if isinstance(found, LineageRow) else ()


def _doubts(name: str, tenant: TenantContents) -> Iterator[_Doubt]:
    """What seems to be missing of what one tenant has."""
    yield from _doubts_of_rows(name, tenant)
    yield from _doubts_of_threads(name, tenant)
    for message_id in tenant.leaving:
        yield _Doubt(StoreFinding("row on its way out", name, message_id), _at(leaving_of(name), message_id))


def _doubts_of_rows(name: str, tenant: TenantContents) -> Iterator[_Doubt]:
    rows, there = tenant.rows, tenant.rows.keys() | tenant.leaving
    for message_id, parents in rows.items():
        own = _row(name, message_id)[0]
        if message_id not in tenant.holders:
            yield _Doubt(StoreFinding("row without holder", name, message_id), own, _any(holders_of(name, message_id)))
        for parent in parents:
            if parent not in there:
                found = StoreFinding("missing parent", name, message_id, why=f"{parent} is not there")
                yield _Doubt(found, own, *_row(name, parent))


def _doubts_of_threads(name: str, tenant: TenantContents) -> Iterator[_Doubt]:
    there = tenant.rows.keys() | tenant.leaving
    for thread, noted in tenant.notes.items():
        for message_id in noted:
            note, row = _any(notes_of(name, thread, message_id)), _row(name, message_id)
            if message_id not in there:
                yield _Doubt(StoreFinding("note without row", name, message_id, thread), note, *row)
            if thread not in tenant.holders.get(message_id, ()):
                holder = _at(holders_of(name, message_id), thread)
                yield _Doubt(StoreFinding("note without holder", name, message_id, thread), note, holder)
    for message_id, thread in tenant.held():
        holder = _at(holders_of(name, message_id), thread)
        if message_id not in there:
            row = _row(name, message_id)
            yield _Doubt(StoreFinding("holder without row", name, message_id, thread), holder, *row)
        if message_id not in tenant.notes.get(thread, ()):
            note = _any(notes_of(name, thread, message_id))
            yield _Doubt(StoreFinding("holder without note", name, message_id, thread), holder, note)
    for thread in tenant.answers.keys() - tenant.notes.keys():
        for call in tenant.answers[thread]:
            answer, notes = _at(answers_of(name, thread), call), _any(notes_of(name, thread))
            yield _Doubt(StoreFinding("answer without note", name, call, thread), answer, notes)


def _at(namespace: tuple[str, ...], key: str) -> Op:
    return GetOp(namespace, key, refresh_ttl=False)


def _any(namespace: tuple[str, ...]) -> Op:
    return SearchOp(namespace, limit=1, refresh_ttl=False)


def _row(name: str, message_id: str) -> tuple[Op, Op]:
    """Where it may be."""
    return _at(rows_of(name), message_id), _at(leaving_of(name), message_id)


async def _confirmed(store: BaseStore, doubts: Sequence[_Doubt]) -> AsyncGenerator[StoreFinding]:
    """What still is so when it is looked at again: each doubt in one question, at one time."""
    for start in range(0, len(doubts), _AT_ONCE):
        some = doubts[start : start + _AT_ONCE]
        answers = iter(await asked(store, [op for doubt in some for op in doubt.ops]))
        for doubt in some:
            if doubt.holds([next(answers) for _ in doubt.ops]):
                yield doubt.finding
