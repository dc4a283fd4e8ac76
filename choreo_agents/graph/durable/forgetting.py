"""What a thread has written is deleted with it, but for what another thread needs.

A forgetting that was broken off is done by the next: what its calls were answered goes first, a thread's notes, which
say what it holds, last, and a row is nowhere only when it is known that nobody needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.store.base import BaseStore, GetOp, PutOp, SearchOp

from choreo_agents.graph.durable.lineage_store import (
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


async def forget_thread(store: BaseStore, tenant: str, thread: str) -> list[str]:
    """Delete a thread's notes, and the rows that only it holds. Both are named as they are in the store.

    Args:
        store: LangGraph's.
        tenant: The thread's.
        thread: Which.

    Returns:
        The ids of the messages whose rows are gone, those included that another forgetting had not come to.

    Raises:
        StoreError: The store has failed; forget the thread again when it works.
    """
    gone = await _finish_leaving(store, tenant)
    answers = await everything(store, answers_of(tenant, thread))
    await _write(store, [PutOp(item.namespace, item.key, None) for item in answers])
    notes = await everything(store, notes_of(tenant, thread), depth=1)
    for start in range(0, len(notes), _AT_ONCE):
        some = notes[start : start + _AT_ONCE]
        ids = [*dict.fromkeys(item.namespace[-1] for item in some)]
        await _write(store, [PutOp(holders_of(tenant, each), thread, None) for each in ids])
        gone += await _drop_unheld(store, tenant, ids)
        await _write(store, [PutOp(item.namespace, item.key, None) for item in some])
    return gone


async def _drop_unheld(store: BaseStore, tenant: str, ids: Sequence[str]) -> list[str]:
    """Delete the rows of these messages that no thread holds, and return the ids of those that are gone.

    A row leaves by way of a place beside, in which it is found until it is known that nobody needs it:

        looked at      here            |leaving          |looked at again
        row            row             |                 |row, if it is held       another process may have begun to
        leaving                        |row              |                         hold it, and found it here
    """
    rows, unheld = rows_of(tenant), await _unheld(store, tenant, ids)
    found = await asked(store, [GetOp(rows, each, refresh_ttl=False) for each in unheld])
    there = {item.key: item.value for item in found if item is not None}
    leaving = [PutOp(leaving_of(tenant), each, row, index=False) for each, row in there.items()]
    await _write(store, [*leaving, *(PutOp(rows, each, None) for each in there)])
    return await _left(store, tenant, there)


async def _finish_leaving(store: BaseStore, tenant: str) -> list[str]:
    """Do what a deletion that was broken off has left: rows that are held stand where they stood, others are gone."""
    items, gone = await everything(store, leaving_of(tenant)), list[str]()
    for start in range(0, len(items), _AT_ONCE):
        gone += await _left(store, tenant, {item.key: item.value for item in items[start : start + _AT_ONCE]})
    return gone


async def _left(store: BaseStore, tenant: str, rows: Mapping[str, dict[str, Any]]) -> list[str]:
    unheld = {*await _unheld(store, tenant, [*rows])}
    back = [PutOp(rows_of(tenant), each, rows[each], index=False) for each in rows if each not in unheld]
    await _write(store, [*back, *(PutOp(leaving_of(tenant), each, None) for each in rows)])
    return [each for each in rows if each in unheld]


async def _write(store: BaseStore, ops: Sequence[Any]) -> None:
    """Have operations committed behind all that others of this process write there."""
    if ops:
        await commits_of(store).enqueue(ops)


async def _unheld(store: BaseStore, tenant: str, ids: Sequence[str]) -> list[str]:
    ops = [SearchOp(holders_of(tenant, each), limit=1, refresh_ttl=False) for each in ids]
    return [each for each, held in zip(ids, await asked(store, ops), strict=True) if not held]
