"""Writes a recording: a file of its user's alone, whole line by whole line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from choreo_agents.engine.recording.format import Line
from choreo_agents.errors import InvalidRequestError


def created(path: Path) -> int:
    """A new file that its user alone may read, open for writing.

    Raises:
        InvalidRequestError: There is one already: nothing is overwritten, and no link is followed.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError:
        raise InvalidRequestError(f"{str(path)!r} is there already: delete it, or record to another file") from None


class RecordingFile:
    """Open for writing. May be used from any thread.

    Each line is handed to the system in one piece: what a process that dies has written, it leaves behind.
    """

    def __init__(self, path: Path) -> None:
        self._file = created(path)
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, line: Line) -> None:
        """Add a line; after `close`, nothing: a run may outlive the block that it began in."""
        written = line.model_dump_json(exclude_defaults=False).encode() + b"\n"
        with self._lock:
            if self._is_closed:
                return
            left = memoryview(written)
            while left:
                left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """End it."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._file)
