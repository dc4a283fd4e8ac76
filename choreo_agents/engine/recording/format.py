"""What a recording holds: each line is one of these, as JSON. And how it is read, also after its process has died.

    header    the engine
    run       a run of a graph begins: its thread, its input, its seed
    message   what a call reads or has made, before the first line that names it
    call      an agent has spoken
    node      a function, a tool or a model of somebody else's has returned
    step      a forward pass
    memory    how much KV lies where
    ran       a run is over
    end       the recording was closed; without it, its process ended before

Digests are made under a key that is not in the file (see `recorder`). Times are seconds since the recording began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from choreo_agents.errors import InvalidRequestError

FORMAT = 4
Origin = Literal["given", "said", "thought", "mapped"]
"""Where a message comes from: it was encoded as it was given, decoded, decoded to think an answer out, or its KV was
computed of another's."""
Outcome = Literal["done", "interrupted", "failed", "left"]
"""How a run ended: by itself, at an interrupt, with an error, or since nobody took more of what it gave."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordingHeader(_Line):
    """The first line."""

    kind: Literal["header"] = "header"
    format: int = FORMAT
    model: str
    """Its name or folder."""
    fingerprint: str
    """The model's."""
    method: Literal["choreo", "baseline", "naive"]
    seed: int
    """The engine's."""
    bytes_per_token: int
    """Of its model's KV."""
    adapters: dict[str, str] = {}
    """Folders, by the names that calls use."""
    adapter: str | None = None
    """The name of that which calls have by default."""
    confidential: bool
    """Whether it has confidential words, too."""
    keyed: Literal["salt", "file"]
    """Where the key of its digests comes from: the tenant's salt, or a file beside it."""
    nonce: str
    proof: str
    """A digest of nothing, by which the key is known."""


class RunStarted(_Line):
    """A run of a graph."""

    kind: Literal["run"] = "run"
    run: int
    """Its number in the recording, from 0."""
    at_s: float
    thread: str | None
    nodes: tuple[str, ...] = ()
    """The graph's, by which it is known."""
    inside: bool = False
    """Whether it is part of a run of another graph, which is not recorded."""
    kept: bool
    """Whether a checkpointer keeps its state."""
    seed: int | None
    """As in `RunOptions`."""
    given: str | None
    """The input, packed (see `graph.recording.packing`); None: it is masked, or cannot be written."""
    goes_on: bool = False
    """Whether its thread had begun before."""
    travels: bool = False
    """Whether it goes on from an earlier checkpoint than the last."""
    recursion_limit: int | None = None
    interrupts: dict[Literal["interrupt_before", "interrupt_after"], list[str]] = {}
    """Nodes before and after which the run was to stop, as its caller has said."""
    edges: tuple[tuple[str, str, str], ...] = ()
    """What its graph declares of who sees what: source, reader, and how, as an edge's label."""


class RecordedMessage(_Line):
    """A message that calls read or have made, by its size and what it was encoded from."""

    kind: Literal["message"] = "message"
    name: str
    """A digest of its words and of all that its encoding has attended to."""
    tokens: int
    parents: tuple[str, ...]
    """The names of what it attends to, each of which has a line before."""
    role: str | None
    """Whose turn it is in a chat."""
    author: str | None = None
    """Who said it first; None: nobody was named."""
    origin: Origin = "given"
    at: int = 0
    """The position at which it was encoded."""
    offsets: tuple[int, ...] = ()
    """Where each parent stood, as seen from its first token."""
    words_of: tuple[str, ...] = ()
    """The names of the messages whose words were encoded again as this one."""
    confidential: bool = False


class RecordedCall(_Line):
    """One message of an agent, and what it was asked for."""

    kind: Literal["call"] = "call"
    run: int
    author: str
    superstep: int
    branch: int
    call: int
    step: int
    """LangGraph's number of the superstep in which it was made."""
    read: int
    """Tokens of its view."""
    reads: tuple[str, ...]
    """The names of the messages in its view, as it began."""
    offsets: tuple[int, ...] = ()
    """Where each of them stands in it."""
    end: int = 0
    """Where its own turn begins."""
    made: str
    """The name of what it has said."""
    thought: str | None
    """The name of what it has decoded to think that out, the answer included; None: it has decoded the answer."""
    header: int
    """Tokens of its own turn that were given."""
    asked_s: float
    first_s: float | None
    """When its first token was there; None: it sampled none."""
    said_s: float
    asked: dict[str, str] = {}
    """Digests of all that it depends on: its view and what that was made of, how its turn begins, its model, its
    sampling and, unless the likeliest token is taken, its seed. Empty: nobody can ask for it again."""
    tokens: tuple[int, ...] | None
    """What was sampled, thoughts included; None: it is masked."""
    is_set: bool = False
    """Whether a fork has set its words: they may be longer than its sampling allows, and nothing was thought out."""
    count: int
    """How many tokens that are."""
    said: str
    """A digest of them."""
    words: str | None
    """The answer; None: it is masked."""
    finish: str | None
    encoded: int = 0
    reused: int = 0
    recomputed: int = 0
    """Tokens that it was charged for (see `Usage`)."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Author, superstep, branch and call."""
        return self.author, self.superstep, self.branch, self.call


class RecordedNode(_Line):
    """One execution of a node that is no agent."""

    kind: Literal["node"] = "node"
    run: int
    node: str
    """Behind the subgraphs that it stands in."""
    step: int
    """LangGraph's number of its superstep."""
    branch: int
    outcome: Literal["result", "interrupt", "error"]
    began_s: float
    ended_s: float


class RecordedStep(_Line):
    """A forward pass, as far as it is the tenant's who records."""

    kind: Literal["step"] = "step"
    at_s: float
    rows: int
    tokens: int
    """That were encoded, of all rows."""


class RecordedMemory(_Line):
    """How much KV the engine holds of the tenant who records; at most a few lines a second."""

    kind: Literal["memory"] = "memory"
    at_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class RunEnded(_Line):
    """A run is over."""

    kind: Literal["ran"] = "ran"
    run: int
    at_s: float
    outcome: Outcome
    error: str | None = None
    """Its kind."""


class RecordingEnded(_Line):
    """The last line."""

    kind: Literal["end"] = "end"


Line = (
    RecordingHeader
    | RunStarted
    | RecordedMessage
    | RecordedCall
    | RecordedNode
    | RecordedStep
    | RecordedMemory
    | RunEnded
    | RecordingEnded
)
LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
OfRun = TypeVar("OfRun", RecordedCall, RecordedNode, RunEnded)


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
        return next(iter(self._of(RunEnded, run)), None)

    def calls(self, run: int | None = None) -> list[RecordedCall]:
        """Of a run, or of all, in the order in which they ended."""
        return self._of(RecordedCall, run)

    def nodes(self, run: int | None = None) -> list[RecordedNode]:
        """The same of functions."""
        return self._of(RecordedNode, run)

    def steps(self) -> list[RecordedStep]:
        return [line for line in self.lines if isinstance(line, RecordedStep)]

    def _of(self, kind: type[OfRun], run: int | None) -> list[OfRun]:
        return [line for line in self.lines if isinstance(line, kind) and run in (None, line.run)]


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


def _parsed(path: Path, written: list[bytes]) -> Iterator[Line]:
    """Each line; none, if the first is of no recording."""
    for number, line in enumerate(written, start=1):
        if number == 1:
            _require_format(path, line)
        try:
            yield LINES.validate_json(line)
        except ValidationError as error:
            if number == 1:
                return
            what = error.errors()[0]["msg"]
            raise InvalidRequestError(f"line {number} of {str(path)!r} is damaged: {what}") from None


def _require_format(path: Path, line: bytes) -> None:
    """Raise `InvalidRequestError` if it is a header of another version."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict) and found.get("kind") == "header" and (other := found.get("format", FORMAT)) != FORMAT:
        raise InvalidRequestError(
            f"{str(path)!r} has format {other!r}, and this version reads {FORMAT}: use the one that wrote it"
        )
