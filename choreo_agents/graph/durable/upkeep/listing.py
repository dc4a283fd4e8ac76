"""All that stands in a store of lineage, piece by piece.

a file of SQLite's, PostgreSQL   by the table itself, in the order of its key: no more than a page is in memory, and
                                 what the store could not read is listed, too
any other store                  namespace by namespace, each in one answer
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from langgraph.store.base import BaseStore, ListNamespacesOp, MatchCondition

from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.forgetting import written_at
from choreo_agents.graph.durable.lineage_store import ROOT, everything, whole

_PAGE = 1024
_NEXT = (
    "SELECT prefix, key, value, updated_at FROM store WHERE prefix LIKE 'choreo.%' AND (prefix, key) > ({0}, {0}) "
    "ORDER BY prefix, key LIMIT {0}"
)
"""With the mark of a parameter: of prefix, key and length of a page."""
_Fetch = Callable[[tuple[str, str, int]], Sequence[Any]]


class StoredEntry(NamedTuple):
    """One value of a store."""

    namespace: tuple[str, ...]
    key: str
    value: Mapping[str, Any] | None
    """None: it is no object of JSON."""
    written: datetime
    """In UTC."""


async def listed(store: BaseStore) -> AsyncGenerator[Sequence[StoredEntry]]:
    """All that stands below our root, in pieces. What is written meanwhile may be among it.

    Raises:
        StoreError: The store has failed.
    """
    fetch = _fetching(store)
    pages = _by_name(store) if fetch is None else _by_key(store, fetch)
    async for page in pages:
        yield page


async def _by_name(store: BaseStore) -> AsyncGenerator[Sequence[StoredEntry]]:
    below = (MatchCondition("prefix", (ROOT,)),)
    for namespace in await whole(store, lambda limit: ListNamespacesOp(below, limit=limit)):
        found = await everything(store, namespace)
        yield [StoredEntry(namespace, each.key, _plain(each.value), written_at(each)) for each in found]


async def _by_key(store: BaseStore, fetch: _Fetch) -> AsyncGenerator[Sequence[StoredEntry]]:
    last = "", ""
    while True:
        try:
            page = await asyncio.to_thread(fetch, (*last, _PAGE))
        except Exception as error:  # of whatever library serves the store
            raise StoreError(f"the store {type(store).__name__} cannot be read ({error!r})") from error
        yield [_entry(*each) for each in page]
        if len(page) < _PAGE:
            return
        last = page[-1][0], page[-1][1]


def _fetching(store: Any) -> _Fetch | None:
    """What reads pages of a store's table; None: it has none that can be read from a thread."""
    connection, psycopg = getattr(store, "conn", None), sys.modules.get("psycopg")
    if isinstance(connection, sqlite3.Connection):
        mark = _NEXT.format("?")

        def rows(given: tuple[str, str, int]) -> Sequence[Any]:
            with store.lock:
                return connection.execute(mark, given).fetchall()

        return rows
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        mark = _NEXT.format("%s").replace("choreo.%", "choreo.%%")

        def items(given: tuple[str, str, int]) -> Sequence[Any]:
            with store.lock, connection.cursor() as cursor:
                found = cursor.execute(mark, given).fetchall()
            return [tuple(each.values()) if isinstance(each, dict) else each for each in found]

        return items
    return None


def _entry(prefix: str, key: str, value: Any, written: Any) -> StoredEntry:
    if isinstance(value, str | bytes):
        raw, value = value, None
        with suppress(ValueError, RecursionError):
            value = json.loads(raw)
    at = datetime.fromisoformat(written) if isinstance(written, str) else written
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return StoredEntry(tuple(prefix.split(".")), key, _plain(value), at)


def _plain(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None
