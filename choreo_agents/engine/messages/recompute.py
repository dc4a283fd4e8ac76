"""KV that is nowhere any more is computed again from its lineage: the same tokens after the same parents."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.runtime.request import Encoding, Request


class Recomputer:
    """Makes the requests that compute lost messages again, one for each at a time.

    Args:
        table: Has the messages.
        number: Numbers the requests.
        encode: How they are encoded.
    """

    def __init__(
        self,
        table: MessageTable,
        number: Callable[[], int],
        encode: Callable[[Lineage, Recomputer], Encoding],
    ) -> None:
        self.table = table
        self._number = number
        self._encode = encode
        self._running: dict[str, Request] = {}

    def recompute(self, message: Message, reader: Request | None) -> tuple[Future[None], Request | None]:
        """What tells when a lost message is back, and the request that brings it unless it is under way already.

        Args:
            message: Lost, or never encoded.
            reader: Who waits for it, and may be charged for it; None: nobody who reads.
        """
        done: Future[None] = Future()
        running = self._running.get(message.handle.id)
        if running is not None:
            running.futures.append(done)
            assert running.readers is not None
            if reader is not None and reader not in running.readers:
                running.readers.append(reader)
            return done, None
        first, lineage = message.promise is not None, message.lineage
        request = Request(
            self._number() if message.promise is None else message.promise,
            self._encode(lineage, self),
            _Recomputation(self, message, first=first),
            author=message.author,
            role=message.role,
            adapter=lineage.adapter,
            mapper=lineage.mapper,
            is_foreign=bool(message.foreign),
            tenant=lineage.tenant,
            label=message.label,
            again=message.again or not first,
            futures=[done],
            readers=[] if reader is None else [reader],
        )
        self._running[message.handle.id] = request
        return done, request

    def running(self, message_id: str) -> Request | None:
        """The request that computes a message again, if there is one."""
        return self._running.get(message_id)

    def ended(self, message: Message, request: Request) -> None:
        """The request that computed it is over."""
        if self._running.get(message.handle.id) is request:
            del self._running[message.handle.id]


@dataclass(eq=False)
class _Recomputation:
    """Owns a request that computes a message again: see `Owner`."""

    recomputer: Recomputer
    message: Message
    first: bool
    """Whether it was promised, and is encoded for the first time."""
    encodes_end: bool = True

    def finish(self, request: Request) -> None:
        self.recomputer.ended(self.message, request)
        usage = Usage.of(request) if self.first else None
        request.encoding.close(request)
        segment = request.hand_over()
        assert segment is not None
        table = self.recomputer.table
        try:
            table.computed(self.message, segment, usage)
        finally:
            if self.message.entry is None or self.message.entry.segment is not segment:
                table.cache.pool.unpin(segment)

    def abandon(self, request: Request) -> None:
        self.recomputer.ended(self.message, request)
        request.encoding.close(request)
        segment = request.hand_over()
        if segment is not None:
            self.recomputer.table.cache.pool.unpin(segment)
