"""State of one router's tenant in an engine: its messages, and its calls under way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from choreo_agents import Engine, MessageHandle
from choreo_agents.engine import Scope
from choreo_agents.engine.delegation import KVKey, Promised

K = TypeVar("K")
V = TypeVar("V")
_MOST_LATEST = 4096


class Latest(dict[K, V]):
    """A dict of the latest entries: older ones than `_MOST_LATEST` are dropped, as nobody asks for them any more."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST_LATEST:
            del self[next(iter(self))]


class Serving:
    """A tenant of one router.

    Args:
        engine: The engine, as `Engine.load` returned it.
        salt: The tenant's secret.
    """

    def __init__(self, engine: Engine, salt: str) -> None:
        assert engine.admin is not None
        self.engine, self.tenant, self._core = engine.tenant(salt), engine.admin.open(salt), engine.admin.core
        self.scope = Scope(None)
        self.answers: dict[int, Any] = {}
        """Answers of calls under way, by number."""
        self.latest = -1
        """Sequence number of the latest that was sent for it."""
        self._made = Latest[int, str]()
        """Ids of what recent calls have made and nothing else had needed before, by sequence number."""
        self._needed: dict[str, int] = {}
        """Sequence number with which the router last needed each message, by id."""

    def take_in(
        self, read: Sequence[str], rows: Collection[KVKey], promised: Mapping[str, Promised], sequence_no: int
    ) -> None:
        """Register what a call reads; raise `UnknownHandleError` if something is neither here nor sent with it."""
        with self._core.lock:
            self.latest = max(sequence_no, self.latest)
            for message_id in read:
                self._needed[message_id] = max(sequence_no, self._needed.get(message_id, sequence_no))
            self.engine.lineage.import_rows(read, rows, promised, self.scope)

    def held(self) -> list[str]:
        """Return the ids of messages that are leased here. Under the engine's lock."""
        return [message.handle.id for message in self._core.table.leased_in(self.scope)]

    def note_made(self, handle: MessageHandle, sequence_no: int) -> None:
        """Note that the router needs what a call has made."""
        with self._core.lock:
            if handle.id not in self._needed:
                self._made[sequence_no] = handle.id
            self._needed[handle.id] = max(sequence_no, self._needed.get(handle.id, sequence_no))

    def leave(self, sequence_no: int) -> bool:
        """Release what only a call that the router has left has made; return whether the call had ended here."""
        if (message_id := self._made.pop(sequence_no, None)) is None:
            return False
        self.release([message_id], sequence_no)
        return True

    def needed(self) -> list[str]:
        """Return the ids of messages that the router needs."""
        with self._core.lock:
            return list(self._needed)

    def release(self, ids: Collection[str], sequence_no: int) -> None:
        """Drop the router's leases of messages, except those that it has needed later."""
        with self._core.lock:
            for message_id in ids:
                if self._needed.get(message_id, sequence_no) > sequence_no:
                    continue
                self._needed.pop(message_id, None)
                message = self._core.table.get(message_id)
                while message is not None and message.scoped[self.scope]:
                    self._core.table.release(message, self.scope)
