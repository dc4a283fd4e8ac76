"""Logs of threads in a store, written without an engine: messages by number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from langgraph.store.base import BaseStore, Op, PutOp
from langgraph.store.memory import InMemoryStore

from choreo_agents.engine.lineage import LoggedMessage
from choreo_agents.engine.messages.message import MessageIds
from choreo_agents.graph.durable.thread_log import ThreadLog
from choreo_agents.kv.store import KVKey

SALT = "s"


def named(number: int) -> str:
    """The id of a message."""
    return f"{number:032x}"


def described(number: int, parents: Sequence[int] = (), memos: Sequence[str] = ()) -> LoggedMessage:
    """A message of one token, which stands behind its parents, of one token each."""
    seen = tuple((named(each), at - len(parents)) for at, each in enumerate(parents))
    key = KVKey(named(number), "model", (number,), seen, len(parents))
    return LoggedMessage(named(number), key, tuple(memos))


def log_of(store: BaseStore, thread: str = "1", salt: str = SALT) -> ThreadLog:
    """As a tenant has it: no model, no engine."""
    message_ids = MessageIds(salt, "", b"")
    engine: Any = SimpleNamespace(lineage=SimpleNamespace(seals=message_ids.seals, name=message_ids.tenant))
    return ThreadLog(store, engine, thread)


class BreakingStore(BaseStore):
    """A store in memory, to which things happen right before one of its writes.

    Args:
        breaks_at: This write, and all that follow, fail.
    """

    def __init__(self, breaks_at: int | None = None) -> None:
        self.inner, self.breaks_at, self.writes = InMemoryStore(), breaks_at, 0
        self.between: dict[int, Sequence[PutOp]] = {}
        """What others write before each write."""

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


def spoiled(value: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """What one commit has written, with its last message changed."""
    return {**value, "messages": [*value["messages"][:-1], {**value["messages"][-1], **changed}]}
