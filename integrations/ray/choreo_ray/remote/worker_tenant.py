"""State of one router's tenant in an engine: its messages, and its calls under way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from choreo_agents import MessageHandle
from choreo_agents.engine.delegation import LineageExchange, LineageRow, ReadLog, Scope, Tenant
from choreo_agents.errors import UnknownHandleError
from choreo_ray.remote.protocol import Promised

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
    """A tenant of one router."""

    def __init__(self, tenant: Tenant) -> None:
        self._core, self.tenant = tenant.core, tenant
        self.scope = Scope(None)
        self.answers: dict[int, Any] = {}
        """Answers of calls under way, by number."""
        self.latest = -1
        """Sequence number of the latest that was sent for it."""
        self._made = Latest[int, str]()
        """Ids of what recent calls have made and nothing else had needed before, by sequence number."""
        self._needed: dict[str, int] = {}
        """Sequence number with which the router last needed each message, by id."""
        self._lineage = LineageExchange(tenant)

    def take_in(
        self, read: Collection[str], sent_rows: Sequence[LineageRow], promised: Mapping[str, Promised], sequence_no: int
    ) -> None:
        """Register what a call reads; raise `UnknownHandleError` if something is neither here nor sent with it."""
        rows = {row.id: row for row in sent_rows}
        with self._core.lock:
            table = self._core.table
            self.latest = max(sequence_no, self.latest)
            for message_id in read:
                self._needed[message_id] = max(sequence_no, self._needed.get(message_id, sequence_no))
            new = [message_id for message_id in rows if table.known(message_id) is None]
            refused = self._lineage.import_messages([key for key in read if key in rows], ReadLog(rows), self.scope)
            for message_id in new:
                message = table.known(message_id)
                if message is not None and message_id in promised:
                    promised[message_id].put_on(message, self._core.next_number())
        if refused:
            raise UnknownHandleError("; ".join(f"{name}: {why}" for name, why in refused.items()))

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
