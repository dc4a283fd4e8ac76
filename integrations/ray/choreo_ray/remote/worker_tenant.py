"""What an engine has of one router's tenant: messages, and calls under way."""

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
    """The latest entries of many: what came long ago is asked for no longer."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST_LATEST:
            del self[next(iter(self))]


class Serving:
    """One tenant's messages here, of one router."""

    def __init__(self, tenant: Tenant) -> None:
        self._core, self.tenant = tenant.core, tenant
        self.scope = Scope(None)
        self.answers: dict[int, Any] = {}
        """Of calls under way, by number."""
        self.latest = -1
        """Stamp of the last that was sent for it."""
        self._made = Latest[int, str]()
        """What calls of late have made that nobody had needed before, by their sequence numbers."""
        self._needed: dict[str, int] = {}
        """When the router said last that it needs a message."""
        self._lineage = LineageExchange(tenant)

    def take_in(
        self, read: Collection[str], sent_rows: Sequence[LineageRow], promised: Mapping[str, Promised], sequence_no: int
    ) -> None:
        """Know what a call reads; raises `UnknownHandleError` if something is not there, and did not come with it."""
        rows = {row.id: row for row in sent_rows}
        with self._core.lock:
            table = self._core.table
            self.latest = max(sequence_no, self.latest)
            for each in read:
                self._needed[each] = max(sequence_no, self._needed.get(each, sequence_no))
            new = [each for each in rows if table.known(each) is None]
            refused = self._lineage.take_in([each for each in read if each in rows], ReadLog(rows), self.scope)
            for each in new:
                message = table.known(each)
                if message is not None and each in promised:
                    promised[each].put_on(message, self._core.next_number())
        if refused:
            raise UnknownHandleError("; ".join(f"{name}: {why}" for name, why in refused.items()))

    def held(self) -> list[str]:
        """Ids of what is leased here. Under the engine's lock."""
        return [message.handle.id for message in self._core.table.held_in(self.scope)]

    def handle(self, message_id: str) -> MessageHandle:
        """Of a leased message."""
        with self._core.lock:
            message = self._core.table.get(message_id)
        if message is None:
            raise UnknownHandleError(f"message {message_id!r} was released")
        return message.handle

    def made(self, handle: MessageHandle, sequence_no: int) -> None:
        """The router needs what a call has made."""
        with self._core.lock:
            if handle.id not in self._needed:
                self._made[sequence_no] = handle.id
            self._needed[handle.id] = max(sequence_no, self._needed.get(handle.id, sequence_no))

    def leave(self, sequence_no: int) -> bool:
        """The router has left a call without an answer: whether it had ended here. What it alone has made goes."""
        if (made := self._made.pop(sequence_no, None)) is None:
            return False
        self.release([made], sequence_no)
        return True

    def needed(self) -> list[str]:
        """Ids of what the router needs."""
        with self._core.lock:
            return list(self._needed)

    def release(self, ids: Collection[str], sequence_no: int) -> None:
        """Drop the router's leases of these, unless it has said later that it needs them."""
        with self._core.lock:
            for each in ids:
                if self._needed.get(each, sequence_no) > sequence_no:
                    continue
                self._needed.pop(each, None)
                message = self._core.table.get(each)
                while message is not None and message.scoped[self.scope]:
                    self._core.table.release(message, self.scope)
