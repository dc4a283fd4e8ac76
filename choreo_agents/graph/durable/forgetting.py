"""What a thread has written is deleted with it, but for what another thread needs.

A forgetting that was broken off is done by the next: a thread's notes, which say what it holds, go last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langgraph.store.base import BaseStore, GetOp, PutOp, SearchOp

from choreo_agents.graph.durable.beside import swept
from choreo_agents.graph.durable.lineage_store import ROOT, asked, commits_of, everything

_AT_ONCE = 512


async def forget_thread(store: BaseStore, tenant: str, thread: str) -> list[str]:
    """Delete a thread's notes, and the rows that only it holds. Both are named as they are in the store.

    Returns:
        The ids of the messages whose rows are gone.

    Raises:
        StoreError: The store has failed; forget the thread again when it works.
    """
    notes, rows = (ROOT, "notes", tenant, thread), (ROOT, "rows", tenant)
    ids, gone = [message_id for message_id, _ in await everything(store, notes)], list[str]()
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        await _write(store, [PutOp(_holders(tenant, each), thread, None) for each in some])
        unheld = await _unheld(store, tenant, some)
        before = dict(zip(unheld, await asked(store, [GetOp(rows, each) for each in unheld]), strict=True))
        await _write(store, [PutOp(rows, each, None) for each in unheld])
        # Another process may have begun to hold it after it was looked at, and found its row.
        left = {*await _unheld(store, tenant, unheld)}
        back = [each for each in unheld if each not in left and before[each] is not None]
        await _write(store, [PutOp(rows, each, before[each].value, index=False) for each in back])
        gone += left
        await _write(store, [PutOp(notes, each, None) for each in some])
    await swept(store)
    return gone


async def _unheld(store: BaseStore, tenant: str, ids: Sequence[str]) -> list[str]:
    ops = [SearchOp(_holders(tenant, each), limit=1, refresh_ttl=False) for each in ids]
    return [each for each, held in zip(ids, await asked(store, ops), strict=True) if not held]


def _holders(tenant: str, message_id: str) -> tuple[str, ...]:
    return (ROOT, "holders", tenant, message_id)


async def _write(store: BaseStore, ops: Sequence[Any]) -> None:
    if ops:
        await commits_of(store).enqueue(ops)
