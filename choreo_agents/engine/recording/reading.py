"""Reads a recording, also one whose process ended before it was closed."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.engine.recording.digests import Digests
from choreo_agents.engine.recording.format import (
    FORMAT,
    LINES,
    Line,
    RecordedCall,
    RecordedNode,
    RecordedStep,
    RecordingEnded,
    RecordingHeader,
    RunEnded,
    RunStarted,
)
from choreo_agents.engine.recording.recorder import PROOF, key_path, salted_key
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class Recording:
    """What a file holds."""

    path: Path
    header: RecordingHeader
    lines: tuple[Line, ...]
    """All behind the header, in order."""
    cut: str | None
    """Where it ends, if its process ended before it was closed."""

    @property
    def runs(self) -> tuple[RunStarted, ...]:
        return tuple(line for line in self.lines if isinstance(line, RunStarted))

    def ended(self, run: int) -> RunEnded | None:
        """How a run ended; None: the recording was cut before."""
        return next((line for line in self.lines if isinstance(line, RunEnded) and line.run == run), None)

    def calls(self, run: int | None = None) -> list[RecordedCall]:
        """Of a run, or of all, in the order in which they ended."""
        found = (line for line in self.lines if isinstance(line, RecordedCall))
        return [line for line in found if run in (None, line.run)]

    def nodes(self, run: int | None = None) -> list[RecordedNode]:
        """The same of functions."""
        found = (line for line in self.lines if isinstance(line, RecordedNode))
        return [line for line in found if run in (None, line.run)]

    def steps(self) -> list[RecordedStep]:
        return [line for line in self.lines if isinstance(line, RecordedStep)]


def read_recording(path: str | Path) -> Recording:
    """The recording in a file. What a process that died has not finished to write is left out.

    Raises:
        InvalidRequestError: It is no recording, damaged, or of another version.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        raise InvalidRequestError(f"there is no recording {str(path)!r}: engine.record(path) writes one")
    path = Path(path)
    written = path.read_bytes().split(b"\n")
    unfinished = written.pop()
    lines = list(_parsed(path, written))
    if not lines or not isinstance(lines[0], RecordingHeader):
        raise InvalidRequestError(f"{str(path)!r} is no recording: engine.record(path) writes one")
    is_whole = isinstance(lines[-1], RecordingEnded) and not unfinished
    cut = None if is_whole else f"it ends after line {len(lines)}: its process ended before the recording was closed"
    return Recording(path, lines[0], tuple(lines[1:]), cut)


def key_of(recording: Recording, seals: Seals) -> bytes:
    """The key of a recording's digests.

    Args:
        recording: Which.
        seals: Of the tenant that has made it.

    Raises:
        ReplayError: It lies in a file that is not there.
        InvalidRequestError: The tenant has another salt, or the file another key.
    """
    header, path = recording.header, key_path(recording.path)
    if header.keyed == "salt":
        key, where = salted_key(seals, header.nonce), "it was recorded under another salt: load the engine with that"
    elif path.is_file():
        key, where = path.read_bytes().strip(), f"{str(path)!r} is the key of another recording"
    else:
        raise ReplayError(
            f"there is no {path.name} beside the recording: without it nobody can tell which calls are as recorded"
        )
    proof = Digests(key, _nobodys).of(PROOF, header.nonce)
    if not hmac.compare_digest(proof.encode(), header.proof.encode()):
        raise InvalidRequestError(f"the digests of {str(recording.path)!r} cannot be checked: {where}")
    return key


def _parsed(path: Path, written: list[bytes]) -> Iterator[Line]:
    for number, line in enumerate(written, start=1):
        try:
            found = LINES.validate_json(line)
        except ValidationError as error:
            if number == 1:
                _require_format(path, _format_of(line))
                raise InvalidRequestError(f"{str(path)!r} is no recording: engine.record(path) writes one") from None
            what = error.errors()[0]
            raise InvalidRequestError(f"line {number} of {str(path)!r} is damaged: {what['msg']}") from None
        if isinstance(found, RecordingHeader):
            _require_format(path, found.format)
        yield found


def _format_of(line: bytes) -> Any:
    """Of a header that this version does not know; its own of what is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return FORMAT
    return found.get("format", FORMAT) if isinstance(found, dict) and found.get("kind") == "header" else FORMAT


def _require_format(path: Path, found: Any) -> None:
    if found != FORMAT:
        raise InvalidRequestError(
            f"{str(path)!r} has format {found!r}, and this version reads {FORMAT}: use the one that wrote it"
        )


def _nobodys(handle: MessageHandle) -> Message:
    raise LookupError(handle)
