"""A store of lineage by the name that a person gives it: a file, or the address of a server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from langgraph.store.base import BaseStore

from choreo_agents.errors import InvalidRequestError, StoreError
from choreo_agents.graph.durable.beside import SUFFIX, opened

_SCHEMES = ("postgresql", "postgres")


@contextmanager
def store_at(place: str) -> Iterator[BaseStore]:
    """A store that is there; none is made.

    Args:
        place: A file with lineage, or that of the checkpointer beside which it is; or `postgresql://...`.

    Raises:
        InvalidRequestError: There is no lineage, or what reads it is not installed.
        StoreError: It cannot be read.
    """
    scheme, found, _ = place.partition("://")
    if not found:
        yield opened(_file(Path(place)))
    elif scheme in _SCHEMES:
        with _server(place) as store:
            yield store
    else:
        raise InvalidRequestError(f"a store is a file, or stands at postgresql://..., not at {scheme!r}")


def _file(path: Path) -> Path:
    beside = path.with_name(path.name + SUFFIX)
    for each in (beside, path):
        if each.is_file() and _has_store(each):
            return each
    what = f"has no store of lineage, nor has {beside.name!r}" if path.is_file() else "is no file"
    raise InvalidRequestError(f"{str(path)!r} {what}: name the file of a SQLite checkpointer, or the one beside it")


def _has_store(path: Path) -> bool:
    """Whether a file has LangGraph's table of a store. Nothing is written to find out."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'store'").fetchone())
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{str(path)!r} cannot be read as a file of SQLite's ({error!r})") from error


@contextmanager
def _server(address: str) -> Iterator[BaseStore]:
    try:
        import psycopg  # noqa: PLC0415 - who has no server need not have it
        from langgraph.store.postgres import PostgresStore  # noqa: PLC0415 - the same
    except ImportError as error:
        raise InvalidRequestError(
            f"what reads PostgreSQL is not installed ({error}): pip install langgraph-checkpoint-postgres "
            "'psycopg[binary]'"
        ) from error
    where = urlsplit(address)
    named = f"{where.hostname or 'this machine'}{where.path}"  # without the password
    try:
        with PostgresStore.from_conn_string(address) as store:
            if not _has_table(store):
                raise InvalidRequestError(f"the database at {named!r} has no store: nothing was ever kept there")
            yield store
    except psycopg.Error as error:
        why = str(error).replace(where.password or "\0", "...")
        raise StoreError(f"the database at {named!r} cannot be read ({type(error).__name__}: {why})") from None


def _has_table(store: object) -> bool:
    connection = getattr(store, "conn", None)
    with connection.cursor() as cursor:  # type: ignore[union-attr]
        return cursor.execute("SELECT 1 WHERE to_regclass('store') IS NOT NULL").fetchone() is not None
