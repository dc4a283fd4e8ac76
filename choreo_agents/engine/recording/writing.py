"""Writes a recording: a file of its user's alone, whole line by whole line."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

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
    """Open for writing. May be used from any thread, and by event loops: another thread waits for the disk.

    Each line is handed to the system in one piece: what a process that dies has written, it leaves behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = created(path)
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="choreo-recording", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Add a line; after `close`, nothing: a run may outlive the block that it began in."""
        with self._lock:
            if not self._is_closed:
                self._lines.put(line)

    def close(self) -> None:
        """End it, when all is written; raises that with which a line could not be: an `OSError`, of a full disk."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lines.put(None)
        self._thread.join()
        os.close(self._file)
        if self._failure is not None:
            raise self._failure

    def discard(self) -> None:
        """End it, and leave no file."""
        with suppress(Exception):
            self.close()
        self._path.unlink()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                left = memoryview(line.model_dump_json().encode() + b"\n")
                while left and self._failure is None:
                    left = left[os.write(self._file, left) :]
            except Exception as failure:
                self._failure = failure  # half a line may stand there, and nothing may follow it
