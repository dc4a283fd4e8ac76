"""What nobody needs leaves a store of lineage, and its file gets smaller."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from langgraph.store.base import BaseStore

from choreo_agents.errors import InvalidRequestError, StoreError
from choreo_agents.graph.durable.forgetting import (
    drop_answers,
    drop_unheld,
    drop_unnoted,
    finish_leaving,
    forget_thread,
    last_written,
)
from choreo_agents.graph.durable.upkeep.contents import OnProgress, TenantContents, contents_of
from choreo_agents.graph.sync_bridge import run_coroutine

_BEGIN = datetime.min.replace(tzinfo=UTC) + timedelta(days=1)
"""Before anything was written."""
_BUSY_S = 30.0
"""For so long another process may write before a file cannot be made smaller."""


@dataclass(frozen=True)
class CompactedStore:
    """What was deleted, or would be."""

    threads: tuple[tuple[str, str], ...]
    """Tenant and thread of those that were forgotten for their age, by their names in the store."""
    rows: int
    notes: int
    """Of those threads."""
    holders: int
    bytes_before: int | None
    """Of the file and its log; None: it is no file of SQLite's."""
    bytes_after: int | None
    """None in a rehearsal, too."""
    is_rehearsal: bool
    """Nothing was deleted."""


async def acompact_store(
    store: BaseStore,
    *,
    older_than: timedelta | None = None,
    dry_run: bool = False,
    on_progress: OnProgress = lambda done: None,
) -> CompactedStore:
    """Delete rows that no thread holds, what threads hold and say nothing of, and threads that nobody has written to
    for long; then make a file of SQLite's as small as what it holds.

    Runs may write to it meanwhile: what is to be deleted is looked at again. What another release has written stays.

    Args:
        store: LangGraph's.
        older_than: Threads that were last written to longer ago are forgotten here, as `app.forget` would; their
            checkpoints are not, and who goes on with one has its words encoded again. None: no thread is.
        dry_run: Delete nothing, and tell what would be.
        on_progress: See `OnProgress`.

    Raises:
        InvalidRequestError: The age is none.
        StoreError: The store has failed; compact it again when it works.
    """
    if older_than is not None and older_than <= timedelta(0):
        raise InvalidRequestError(f"older_than must be longer than no time at all, not {older_than!r}")
    since = None if older_than is None else datetime.now(UTC) - older_than
    found = await contents_of(store, on_progress=on_progress)
    file = await asyncio.to_thread(_file_of, store)
    before = None if file is None else _bytes_of(file)
    plans = {name: _Plan.of(tenant, since) for name, tenant in found.items()}
    if dry_run:
        threads = tuple((name, thread) for name, plan in plans.items() for thread in plan.threads)
        return CompactedStore(
            threads,
            rows=sum(len(plan.rows) for plan in plans.values()),
            notes=sum(plan.notes for plan in plans.values()),
            holders=sum(plan.holders + len(plan.unnoted) for plan in plans.values()),
            bytes_before=before,
            bytes_after=None,
            is_rehearsal=True,
        )
    done = _Done()
    for name, plan in plans.items():
        await done.follow(store, name, plan, found[name], since)
    if file is not None:
        await asyncio.to_thread(_vacuum, file)
    after = None if file is None else _bytes_of(file)
    return CompactedStore(tuple(done.threads), done.rows, done.notes, done.holders, before, after, is_rehearsal=False)


def compact_store(
    store: BaseStore,
    *,
    older_than: timedelta | None = None,
    dry_run: bool = False,
    on_progress: OnProgress = lambda done: None,
) -> CompactedStore:
    """See `acompact_store`."""
    return run_coroutine(acompact_store(store, older_than=older_than, dry_run=dry_run, on_progress=on_progress))


@dataclass(frozen=True)
class _Plan:
    """What seems to be needed by nobody, of one tenant."""

    threads: tuple[str, ...]
    """That are old, ..."""
    notes: int
    """... with so many notes, ..."""
    holders: int
    """... and so many messages that they hold."""
    unnoted: tuple[tuple[str, str], ...]
    """Id and thread of what is held, and nothing said of."""
    unsaid: tuple[str, ...]
    """Threads whose calls were answered, and that say nothing."""
    rows: tuple[str, ...]
    """That nobody holds once all of this is gone."""

    @staticmethod
    def of(tenant: TenantContents, since: datetime | None) -> _Plan:
        """What is to be done, by what was read. Before `since` a thread is old."""
        strange = {name for kind, name in tenant.foreign if kind != "rows"}
        old = {thread for thread, at in tenant.written.items() if since is not None and at < since}
        old = {thread for thread in old if not strange & (tenant.notes[thread] | tenant.answers.get(thread, set()))}
        unnoted = {
            (each, thread)
            for each, thread in tenant.held()
            if each not in tenant.notes.get(thread, ()) and each not in strange
        }

        def is_needed(message_id: str) -> bool:
            threads = tenant.holders.get(message_id, ())
            return any(thread not in old and (message_id, thread) not in unnoted for thread in threads)

        unread = {name for _, name in tenant.foreign}
        rows = [each for each in {*tenant.rows, *tenant.leaving} if each not in unread and not is_needed(each)]
        return _Plan(
            tuple(sorted(old)),
            notes=sum(len(tenant.notes[thread]) for thread in old),
            holders=sum(thread in old and (each, thread) not in unnoted for each, thread in tenant.held()),
            unnoted=tuple(sorted(unnoted)),
            unsaid=tuple(sorted(each for each in tenant.answers.keys() - tenant.notes.keys())),
            rows=tuple(sorted(rows)),
        )


class _Done:
    """What has been deleted so far."""

    def __init__(self) -> None:
        self.threads = list[tuple[str, str]]()
        self.rows = self.notes = self.holders = 0

    async def follow(
        self, store: BaseStore, name: str, plan: _Plan, tenant: TenantContents, since: datetime | None
    ) -> None:
        """Delete what a plan says, if it still is so."""
        self.rows += len(await finish_leaving(store, name))
        for thread in plan.threads:
            if since is None or await last_written(store, name, thread) >= since:
                continue
            self.rows += len(await forget_thread(store, name, thread, unless_since=since))
            self.threads.append((name, thread))
            self.notes += len(tenant.notes[thread])
            self.holders += _held_by(thread, tenant.holders, tenant.notes[thread])
        self.holders += len(await drop_unnoted(store, name, plan.unnoted))
        for thread in plan.unsaid:
            if not tenant.answers[thread] & {key for kind, key in tenant.foreign if kind == "answers"}:
                await drop_answers(store, name, thread, unless_since=_BEGIN)
        self.rows += len(await drop_unheld(store, name, plan.rows))


def _held_by(thread: str, holders: Mapping[str, set[str]], noted: Iterable[str]) -> int:
    return sum(thread in holders.get(each, ()) for each in noted)


def _file_of(store: Any) -> Path | None:
    """The file of a store of SQLite's; None: it has none."""
    connection = getattr(store, "conn", None)
    if not isinstance(connection, sqlite3.Connection):
        return None
    with store.lock:
        listed = connection.execute("PRAGMA database_list").fetchall()
    return next((Path(file) for _, name, file in listed if name == "main" and file), None)


def _bytes_of(file: Path) -> int:
    """With its log."""
    parts = (file, file.with_name(file.name + "-wal"))
    return sum(part.stat().st_size for part in parts if part.exists())


def _vacuum(file: Path) -> None:
    """Write a file anew, without what was deleted, and empty its log."""
    try:
        connection = sqlite3.connect(file, isolation_level=None, timeout=_BUSY_S)
        try:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(
            f"what nobody needs is deleted, but {str(file)!r} is as large as before ({error!r}): compact it again when "
            "nobody writes there, and there is room for a copy of it"
        ) from error
