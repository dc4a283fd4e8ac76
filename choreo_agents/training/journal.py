"""Results as lines of JSON, on disk one by one: a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.files import put

Record = dict[str, Any]
_END = b"\n"
"""Nothing else ends a line: answers may hold what Unicode calls a line separator."""


class Journal(AbstractContextManager["Journal"]):
    """The records of one run by key; each key once, whatever interrupts it.

    The first line says what the run is, so that results of two different ones never mix. A line that was cut in the
    middle is dropped. While it is open nobody else writes to it.

    Args:
        path: A file, made if need be; None keeps the records in memory.
        settings: What decides the results, as plain JSON.

    Raises:
        InvalidRequestError: The file holds another run's results, is no such file, or is being written to.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        """What is known, in the order in which it was found out."""
        self._file: FileIO | None = None
        with ExitStack() as locks:
            if path is not None:
                taken = f"{str(path)!r} is being written to by another run: wait, or name another"
                locks.enter_context(locked(path.with_name(path.name + ".lock"), taken))
                self._open(path, json.loads(json.dumps(settings)))
            self._locks = locks.pop_all()

    def _open(self, path: Path, settings: Mapping[str, Any]) -> None:
        found = path.read_bytes() if path.exists() else b""
        *lines, torn = found.split(_END)
        self._head = head = _line({"settings": settings})
        if lines:
            _require_same(path, lines[0], settings)
        elif not head.startswith(torn):
            raise InvalidRequestError(f"{str(path)!r} holds no results of ours: name another file")
        self.records = _records(path, lines)
        file = self._file = path.open("ab", buffering=0)
        file.truncate(len(found) - len(torn))
        if not lines:
            self._write(head)

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, record: Record) -> None:
        """Write one result down; it is on disk when this returns."""
        assert key not in self.records, f"{key} is there already"
        self._write(_line({"key": key, **record}))
        self.records[key] = json.loads(json.dumps(record))

    def keep(self, keys: Container[str]) -> None:
        """Drop all other records, as if they had never been added: whole or not at all."""
        self.records = {key: record for key, record in self.records.items() if key in keys}
        if self._file is None or self.path is None:
            return
        with put(self.path) as partial, partial.open("wb") as file:
            file.writelines([self._head, *(_line({"key": key, **record}) for key, record in self.records.items())])
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        self._file = self.path.open("ab", buffering=0)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        before = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            # Half a line would spoil the next one, were there room for it.
            with suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        """Let others write to the file."""
        if self._file is not None:
            self._file.close()
        self._locks.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold a lock, whose file is gone behind the block.

    Args:
        path: Of the file, whose folder is made if need be.
        taken: What is said if another run holds it.

    Raises:
        InvalidRequestError: Another run does.
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
    """The records of a journal that may still be written to, by key; that of line n is the n-1st.

    Raises:
        InvalidRequestError: A line is no record.
        OSError: There is no such file.
    """
    *lines, _ = path.read_bytes().split(_END)
    return _records(path, lines)


def _require_same(path: Path, line: bytes, settings: Mapping[str, Any]) -> None:
    known = _parsed(path, 1, line).get("settings")
    if not isinstance(known, dict):
        raise InvalidRequestError(f"{str(path)!r} holds no results of ours: name another file")
    other = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
    if other:
        differs = ", ".join(f"{name} {known.get(name)!r}, not {settings.get(name)!r}" for name in sorted(other))
        raise InvalidRequestError(f"{str(path)!r} holds another run's results, with {differs}: name another file")


def _records(path: Path, lines: Sequence[bytes]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for number, line in enumerate(lines[1:], start=2):
        record = _parsed(path, number, line)
        key = str(record.pop("key"))
        if key in records:
            raise InvalidRequestError(f"line {number} of {str(path)!r} is a second record of {key!r}: remove one")
        records[key] = record
    return records


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise InvalidRequestError(f"line {number} of {str(path)!r} is no JSON: {error}") from error
    if not isinstance(found, dict) or (number > 1 and "key" not in found):
        raise InvalidRequestError(f"line {number} of {str(path)!r} is no result of ours: {line[:60]!r}")
    return found
