"""Records served calls, in a directory for each tenant, for `/inspect`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from pathlib import Path

from langchain_core.messages import AIMessageChunk

from choreo_agents.chat import ChatCall, RecordedChats, astreamed, remove_recording
from choreo_server.errors import LOG
from choreo_server.looking import is_safe_name

FILE_BYTES = 8 << 20
"""Bytes of a recording after which the next one is begun, because a page shows a whole recording."""
FILES = 16
"""Most recordings of the server in a tenant's directory: before a new one is begun, the oldest is removed."""
_BEGINS = "served-"


class Recording:
    """Recorder of a server's calls, for one event loop.

    Errors of a recording are logged and do not fail the request.

    Args:
        folder: Directory of recordings: `FOLDER/TENANT/served-*.jsonl`; without keys `FOLDER/served-*.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str | None, RecordedChats] = {}

    async def astreamed(self, tenant: str | None, call: ChatCall) -> AsyncGenerator[AIMessageChunk]:
        """Stream a call as `chat.astreamed` does, and record it once it is complete.

        Args:
            tenant: The tenant; None if there are no keys.
            call: A call of a request.
        """
        asked_s, first_s = time.perf_counter(), None
        async with aclosing(astreamed(call)) as pieces:
            async for piece in pieces:
                if first_s is None and (piece.content or piece.tool_call_chunks):
                    first_s = time.perf_counter()
                if piece.chunk_position == "last":  # messages that it has read are leased until it ends
                    self._note(tenant, call, asked_s, first_s)
                yield piece

    def close(self) -> None:
        """Close all recordings."""
        for tenant in [*self._open]:
            self._close(tenant)

    def _note(self, tenant: str | None, call: ChatCall, asked_s: float, first_s: float | None) -> None:
        if tenant is not None and not is_safe_name(tenant):
            return  # `/inspect` shows no directory of that name
        try:
            if tenant in self._open and not _has_room(self._open[tenant].path):
                self._close(tenant)
            if tenant not in self._open:
                self._open[tenant] = RecordedChats(call.engine, self._new_path(tenant))
            self._open[tenant].note(call, asked_s, first_s)
        except Exception:
            LOG.exception("a call could not be recorded")

    def _new_path(self, tenant: str | None) -> Path:
        folder = self._folder if tenant is None else self._folder / tenant
        folder.mkdir(mode=0o700, exist_ok=True)
        before = sorted(folder.glob(f"{_BEGINS}*.jsonl"))  # by the time at which they began
        for path in before[: max(0, len(before) + 1 - FILES)]:
            remove_recording(path)
        return folder / f"{_BEGINS}{datetime.now():%Y-%m-%dT%H-%M-%S-%f}.jsonl"

    def _close(self, tenant: str | None) -> None:
        try:
            self._open.pop(tenant).close()
        except Exception:
            LOG.exception("a recording could not be completed")


def _has_room(path: Path) -> bool:
    """Return whether a recording still exists and is not full."""
    try:
        return path.stat().st_size <= FILE_BYTES
    except FileNotFoundError:
        return False
