"""Lineage in a store, written without an engine: messages by number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from langgraph.store.base import BaseStore, Op, PutOp
from langgraph.store.memory import InMemoryStore

from choreo_agents.engine.lineage import DescribedMessage, LineageRow, Note, SealedRows
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.graph.durable.lineage_store import LineageStore

SALT = "s"


def sealed_of(salt: str) -> tuple[str, SealedRows]:
    """A tenant's name in a store, and its rows there: no model, no engine."""
    naming = Naming(salt, "", b"")
    return naming.tenant, SealedRows(naming.seals)


TENANT, SEALED = sealed_of(SALT)


def named(number: int) -> str:
    """The id of a message."""
    return f"{number:032x}"


def described(number: int, parents: Sequence[int] = ()) -> DescribedMessage:
    """A message of one token."""
    row = LineageRow(named(number), "model", (number,), tuple((named(each), -1) for each in parents), 0)
    return DescribedMessage(row, Note(named(number)))


def store_of(store: BaseStore, salt: str = SALT) -> LineageStore:
    """As a tenant has it."""
    name, sealed = sealed_of(salt)
    engine: Any = SimpleNamespace(lineage=SimpleNamespace(sealed=sealed, name=name))
    return LineageStore(store, engine)


def thread_named(thread: str, salt: str = SALT) -> str:
    """What a thread is called there."""
    return sealed_of(salt)[1].thread(thread)


def writes(
    thread: str, numbers: Iterable[int], parents: Mapping[int, Sequence[int]] | None = None, salt: str = SALT
) -> list[PutOp]:
    """What writes messages for a thread."""
    messages = [described(each, (parents or {}).get(each, ())) for each in numbers]
    return store_of(InMemoryStore(), salt).writes(thread_named(thread, salt), messages)


def keys_of(store: BaseStore, *below: str) -> list[tuple[str, ...]]:
    """Namespace and key of all that there is."""
    found = [item for space in store.list_namespaces(limit=10**6) for item in store.search(space, limit=10**6)]
    return sorted({(*item.namespace[1:], item.key) for item in found if item.namespace[: len(below)] == below})


class BreakingStore(BaseStore):
    """A store in memory, to which things happen right before one of its writes.

    Args:
        breaks_at: This write, and all that follow, fail.
        between: What others write before each write.
    """

    def __init__(self, breaks_at: int | None = None) -> None:
        self.inner, self.breaks_at, self.writes = InMemoryStore(), breaks_at, 0
        self.between: dict[int, Sequence[PutOp]] = {}

    def batch(self, ops: Iterable[Op]) -> list[Any]:
        listed = list(ops)
        if any(isinstance(op, PutOp) for op in listed):
            self.inner.batch(self.between.pop(self.writes, ()))
            if self.breaks_at is not None and self.writes >= self.breaks_at:
                raise ConnectionError("nobody answers")
            self.writes += 1
        return self.inner.batch(listed)

    async def abatch(self, ops: Iterable[Op]) -> list[Any]:
        raise NotImplementedError("sync only")
