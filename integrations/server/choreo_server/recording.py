"""What tenants ask is recorded while it is served: each in the folder of its name, for `/inspect`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from pathlib import Path

from langchain_core.messages import AIMessageChunk

from choreo_agents.chat import ChatCall, RecordedChats, astreamed, remove_recording
from choreo_server.errors import LOG
from choreo_server.looking import is_name

FILE_BYTES = 8 << 20
"""Of a recording, after which the next is begun: a page is made of all of it."""
FILES = 16
"""Recordings that a tenant's folder keeps of those made here: before another is begun the oldest is removed."""
_BEGINS = "served-"


class Recording:
    """What a server records. For one event loop.

    Whatever goes wrong with a recording is logged, and the request is answered.

    Args:
        folder: Of all recordings, `FOLDER/TENANT/served-*.jsonl`; without keys `FOLDER/served-*.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str | None, RecordedChats] = {}

    async def astreamed(self, tenant: str | None, call: ChatCall) -> AsyncGenerator[AIMessageChunk]:
        """As `chat.astreamed`; the call is written down once it is said.

        Args:
            tenant: Whose; None: there are no keys.
            call: Of a request.
        """
        asked_s, first_s = time.perf_counter(), None
        async with aclosing(astreamed(call)) as pieces:
            async for piece in pieces:
                if first_s is None and (piece.content or piece.tool_call_chunks):
                    first_s = time.perf_counter()
                if piece.chunk_position == "last":  # what it has read is held until it ends
                    self._note(tenant, call, asked_s, first_s)
                yield piece

    def close(self) -> None:
        """End all files."""
        for tenant in [*self._open]:
            self._end(tenant)

    def _note(self, tenant: str | None, call: ChatCall, asked_s: float, first_s: float | None) -> None:
        if tenant is not None and not is_name(tenant):
            return  # nobody is shown a folder of that name
        try:
            if tenant in self._open and not _has_room(self._open[tenant].path):
                self._end(tenant)
            if tenant not in self._open:
                self._open[tenant] = RecordedChats(call.engine, self._next(tenant))
            self._open[tenant].note(call, asked_s, first_s)
        except Exception:
            LOG.exception("a call could not be recorded")

    def _next(self, tenant: str | None) -> Path:
        folder = self._folder if tenant is None else self._folder / tenant
        folder.mkdir(mode=0o700, exist_ok=True)
        before = sorted(folder.glob(f"{_BEGINS}*.jsonl"))  # by the time at which they began
        for path in before[: max(0, len(before) + 1 - FILES)]:
            remove_recording(path)
        return folder / f"{_BEGINS}{datetime.now():%Y-%m-%dT%H-%M-%S-%f}.jsonl"

    def _end(self, tenant: str | None) -> None:
        try:
            self._open.pop(tenant).close()
        except Exception:
            LOG.exception("a recording could not be written to its end")


def _has_room(path: Path) -> bool:
    """Whether a recording is there and is to have more."""
    try:
        return path.stat().st_size <= FILE_BYTES
    except FileNotFoundError:
        return False
