"""What a thread has written is deleted with it, but for what another thread needs.

A forgetting that was broken off is done by the next: what its calls were answered goes first, a thread's notes, which
say what it holds, last, and a row is nowhere only when it is known that nobody needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import BaseStore, GetOp, PutOp, SearchItem, SearchOp

from choreo_agents.graph.durable.lineage_store import (
    HOLDS,
    answers_of,
    asked,
    commits_of,
    everything,
    holders_of,
    leaving_of,
    notes_of,
    rows_of,
)

_AT_ONCE = 512


async def forget_thread(
    store: BaseStore, tenant: str, thread: str, *, unless_since: datetime | None = None
) -> list[str]:
    """Delete a thread's notes, and the rows that only it holds. Both are named as they are in the store.

    Args:
        store: LangGraph's.
        tenant: The thread's.
        thread: Which.
        unless_since: A thread that is written to from then on is left as it is: one that another process goes on
            with meanwhile keeps what was not deleted yet.

    Returns:
        The ids of the messages whose rows are gone, those included that another forgetting had not come to.

    Raises:
        StoreError: The store has failed; forget the thread again when it works.
    """
    gone = await finish_leaving(store, tenant)
    await drop_answers(store, tenant, thread, unless_since=unless_since)
    notes = await everything(store, notes_of(tenant, thread), depth=1)
    for start in range(0, len(notes), _AT_ONCE):
        if await _is_written(store, tenant, thread, unless_since):
            break
        some = notes[start : start + _AT_ONCE]
        ids = [*dict.fromkeys(item.namespace[-1] for item in some)]
        await write(store, [PutOp(holders_of(tenant, each), thread, None) for each in ids])
        gone += await drop_unheld(store, tenant, ids)
        await write(store, [PutOp(item.namespace, item.key, None) for item in some])
    return gone


async def drop_answers(store: BaseStore, tenant: str, thread: str, *, unless_since: datetime | None = None) -> None:
    """Delete what a thread's calls were answered, unless it is written to since then.

    Raises:
        StoreError: The store has failed.
    """
    if not await _is_written(store, tenant, thread, unless_since):
        answers = await everything(store, answers_of(tenant, thread))
        await write(store, [PutOp(item.namespace, item.key, None) for item in answers])


async def drop_unheld(store: BaseStore, tenant: str, ids: Sequence[str]) -> list[str]:
    """Delete the rows of these messages that no thread holds, and return the ids of those that are gone.

    A row leaves by way of a place beside, in which it is found until it is known that nobody needs it:

        looked at      here            |leaving          |looked at again
        row            row             |                 |row, if it is held       another process may have begun to
        leaving                        |row              |                         hold it, and found it here

    Raises:
        StoreError: The store has failed.
    """
    gone, rows = list[str](), rows_of(tenant)
    for start in range(0, len(ids), _AT_ONCE):
        unheld = await _unheld(store, tenant, ids[start : start + _AT_ONCE])
        found = await asked(store, [GetOp(rows, each, refresh_ttl=False) for each in unheld])
        there = {item.key: item.value for item in found if item is not None}
        leaving = [PutOp(leaving_of(tenant), each, row, index=False) for each, row in there.items()]
        await write(store, [*leaving, *(PutOp(rows, each, None) for each in there)])
        gone += await _left(store, tenant, there)
    return gone


async def finish_leaving(store: BaseStore, tenant: str) -> list[str]:
    """Do what a deletion that was broken off has left: rows that are held stand where they stood, others are gone.

    Raises:
        StoreError: The store has failed.
    """
    items, gone = await everything(store, leaving_of(tenant)), list[str]()
    for start in range(0, len(items), _AT_ONCE):
        gone += await _left(store, tenant, {item.key: item.value for item in items[start : start + _AT_ONCE]})
    return gone


async def _left(store: BaseStore, tenant: str, rows: Mapping[str, dict[str, Any]]) -> list[str]:
    unheld = {*await _unheld(store, tenant, [*rows])}
    back = [PutOp(rows_of(tenant), each, rows[each], index=False) for each in rows if each not in unheld]
    await write(store, [*back, *(PutOp(leaving_of(tenant), each, None) for each in rows)])
    return [each for each in rows if each in unheld]


async def drop_unnoted(store: BaseStore, tenant: str, held: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Have threads no longer hold messages that they say nothing of: id and thread of each; return those that are gone.

    Raises:
        StoreError: The store has failed.
    """
    gone = list[tuple[str, str]]()
    for start in range(0, len(held), _AT_ONCE):
        unnoted = await _unnoted(store, tenant, held[start : start + _AT_ONCE])
        await write(store, [PutOp(holders_of(tenant, each), thread, None) for each, thread in unnoted])
        left = {*await _unnoted(store, tenant, unnoted)}
        back = [each for each in unnoted if each not in left]  # written meanwhile, with its note
        await write(store, [PutOp(holders_of(tenant, each), thread, HOLDS, index=False) for each, thread in back])
        gone += left
    return gone


async def last_written(store: BaseStore, tenant: str, thread: str) -> datetime:
    """When a thread has last written of a message; in the first year, if it never has."""
    return max(map(written_at, await everything(store, notes_of(tenant, thread), depth=1)), default=_NEVER)


def written_at(item: SearchItem) -> datetime:
    """When something was written; SQLite says it without the zone, which is UTC."""
    at = item.updated_at
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


async def _is_written(store: BaseStore, tenant: str, thread: str, since: datetime | None) -> bool:
    return since is not None and await last_written(store, tenant, thread) >= since


_NEVER = datetime.min.replace(tzinfo=UTC)


async def write(store: BaseStore, ops: Sequence[Any]) -> None:
    """Have operations committed behind all that others of this process write there."""
    if ops:
        await commits_of(store).enqueue(ops)


async def _unheld(store: BaseStore, tenant: str, ids: Sequence[str]) -> list[str]:
    ops = [SearchOp(holders_of(tenant, each), limit=1, refresh_ttl=False) for each in ids]
    return [each for each, held in zip(ids, await asked(store, ops), strict=True) if not held]


async def _unnoted(store: BaseStore, tenant: str, held: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    ops = [SearchOp(notes_of(tenant, thread, each), limit=1, refresh_ttl=False) for each, thread in held]
    return [each for each, noted in zip(held, await asked(store, ops), strict=True) if not noted]
