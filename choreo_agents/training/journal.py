"""Journals: results as lines of JSON, synced to disk one by one, so that a killed run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from choreo_agents.errors import InvalidRequestError

Record = dict[str, Any]
_END = b"\n"
"""The only end of a line: answers may contain Unicode line separators, at which `splitlines` would cut."""


class Journal(ExitStack):
    """Records of a run by key, each key once, whatever interrupts the run.

    The first line has the settings, so results of different runs never mix. A line that was cut off is dropped. While
    the journal is open, a lock keeps other processes from writing to it.

    Args:
        path: The file, which is created if need be; None keeps the records in memory.
        settings: All that decides the results, as plain JSON.

    Raises:
        InvalidRequestError: The file holds another run's results, is no journal, or is being written to.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.path = path
        self.records: dict[str, Record] = {}
        """Records by key, in the order in which they were added."""
        self._file: FileIO | None = None
        with ExitStack() as opened:
            if path is not None:
                taken = f"another run is writing to {str(path)!r}: wait, or pass another file"
                opened.enter_context(locked(path.with_name(path.name + ".lock"), taken))
                self._open(path, json.loads(json.dumps(settings)), opened)
            self.push(opened.pop_all())

    def _open(self, path: Path, settings: Mapping[str, Any], opened: ExitStack) -> None:
        data = path.read_bytes() if path.exists() else b""
        *lines, torn = data.split(_END)
        head = _line({"settings": settings})
        if lines:
            _require_same(path, lines[0], settings)
        elif not head.startswith(torn):
            raise InvalidRequestError(f"{str(path)!r} is not a file of results: pass another file")
        self.records = _records(path, lines)
        self._file = opened.enter_context(path.open("ab", buffering=0))
        self._file.truncate(len(data) - len(torn))
        if not lines:
            self._write(head)

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, record: Record) -> None:
        """Append a record; it is on disk when this returns."""
        assert key not in self.records, f"{key} is there already"
        self._write(_line({"key": key, **record}))
        self.records[key] = json.loads(json.dumps(record))

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        before = os.fstat(self._file.fileno()).st_size
        try:
            unwritten = memoryview(line)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            os.fsync(self._file.fileno())
        except OSError:
            # The next line must not continue a partial one.
            with suppress(OSError):
                self._file.truncate(before)
            raise


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold a file lock during the block; the lock file is removed after it.

    Args:
        path: The lock file, whose directory is created if need be.
        taken: Error message if another process holds the lock.

    Raises:
        InvalidRequestError: Another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise InvalidRequestError(taken) from error
    try:
        yield
    finally:
        with suppress(OSError):  # in this order: once it is released, the file may be another run's
            path.unlink()
        lock.release()


def read_journal(path: Path) -> dict[str, Record]:
    """Read the records of a journal by key, in the order of its lines; it may still be written to.

    Raises:
        InvalidRequestError: A line is no record.
        OSError: There is no such file.
    """
    *lines, _ = path.read_bytes().split(_END)
    return _records(path, lines)


def _require_same(path: Path, line: bytes, settings: Mapping[str, Any]) -> None:
    written = _parse(path, 1, line).get("settings")
    if not isinstance(written, dict):
        raise InvalidRequestError(f"{str(path)!r} is not a file of results: pass another file")
    changed = [name for name in {**written, **settings} if written.get(name) != settings.get(name)]
    if changed:
        differs = ", ".join(f"{name} {written.get(name)!r}, not {settings.get(name)!r}" for name in sorted(changed))
        raise InvalidRequestError(f"{str(path)!r} has results of another run, with {differs}: pass another file")


def _records(path: Path, lines: Sequence[bytes]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for number, line in enumerate(lines[1:], start=2):
        record = _parse(path, number, line)
        key = str(record.pop("key"))
        if key in records:
            raise InvalidRequestError(f"line {number} of {str(path)!r} is a second record of {key!r}: remove one")
        records[key] = record
    return records


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise InvalidRequestError(f"line {number} of {str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(record, dict) or (number > 1 and "key" not in record):
        raise InvalidRequestError(f"line {number} of {str(path)!r} is not a result: {line[:60]!r}")
    return record
