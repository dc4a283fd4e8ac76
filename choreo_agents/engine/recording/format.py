"""File format of recordings: each line is one of these models as JSON. A reader accepts files of crashed processes.

   header    the engine
   run       a run of a graph begins: its thread, its input, its seed
   message   a message that a call reads or has made, before the first line that names it
   call      an agent has answered
   node      a function, a tool or another library's model has returned
   step      a forward pass
   memory    how much KV is in each tier
   ran       a run has ended
   end       the recording was closed; without it, its process ended before

Digests are made under a key that is not in the file (see `recorder`). Times are seconds since the recording began.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from choreo_agents.errors import InvalidRequestError

FORMAT = 6
Origin = Literal["prefilled", "decoded", "thought", "mapped"]
"""Origin of a message: prefilled, decoded, decoded with thoughts, or mapped from another message's KV."""
Outcome = Literal["done", "interrupted", "failed", "left"]
"""How a run ended: by itself, at an interrupt, with an error, or because its caller stopped iterating."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordingHeader(_Line):
    """First line: the engine, and the key of the digests."""

    kind: Literal["header"] = "header"
    format: int = FORMAT
    model: str
    """Name or folder of the model."""
    fingerprint: str
    """Fingerprint of the model."""
    method: Literal["choreo", "baseline", "naive"]
    seed: int
    """Seed of the engine."""
    bytes_per_token: int
    """Bytes of the model's KV per token."""
    adapters: dict[str, str] = {}
    """Folders of adapters, by the names that calls use."""
    adapter: str | None = None
    """Name of the default adapter."""
    confidential: bool
    """Whether confidential text is recorded."""
    keyed: Literal["salt", "file"]
    """Source of the key of its digests: the tenant's salt, or a file next to it."""
    nonce: str
    proof: str
    """Digest of a constant, by which the key is recognized."""


class _Version(BaseModel):
    """What the header of every version has."""

    kind: Literal["header"]
    format: int


class RunStarted(_Line):
    """Start of a run of a graph."""

    kind: Literal["run"] = "run"
    run: int
    """Number of the run in the recording, from 0."""
    at_s: float
    thread: str | None
    nodes: tuple[str, ...] = ()
    """Nodes of the graph, by which it is recognized."""
    inside: bool = False
    """Whether it is part of another graph's run that is not recorded."""
    kept: bool
    """Whether a checkpointer keeps its state."""
    seed: int | None
    """Seed, as in `RunOptions`."""
    input: str | None
    """Input, packed (see `graph.recording.packing`); None: it is masked, or cannot be written."""
    unknown_start: str | None = None
    """Why the state in which it began is not in the recording, as the end of a sentence; None: it is."""
    recursion_limit: int | None = None
    interrupts: dict[Literal["interrupt_before", "interrupt_after"], str | list[str]] = {}
    """Nodes before and after which the run stops, as its caller asked."""
    edges: tuple[tuple[str, str, str], ...] = ()
    """Visibility declared by its graph: source, reader, and an edge's label."""


class RecordedMessage(_Line):
    """A message that calls read or made, by its size and lineage."""

    kind: Literal["message"] = "message"
    name: str
    """Digest of its text and of all that its KV has attended to."""
    tokens: int
    parents: tuple[str, ...]
    """Names of its parents, each of which has an earlier line."""
    role: str | None
    """Role of its turn in a chat."""
    author: str | None = None
    """First author; None: unknown."""
    origin: Origin = "prefilled"
    position: int = 0
    """Position at which it was encoded."""
    offsets: tuple[int, ...] = ()
    """Offset of each parent relative to its first token."""
    sources: tuple[str, ...] = ()
    """Names of the messages whose text was encoded again as this one."""
    confidential: bool = False


class RecordedCall(_Line):
    """A message of an agent, and the call that made it."""

    kind: Literal["call"] = "call"
    run: int
    author: str
    superstep: int
    branch: int
    call: int
    step: int
    """LangGraph's number of the superstep in which it was made."""
    view: tuple[str, ...]
    """Names of the messages in its view when it began."""
    offsets: tuple[int, ...] = ()
    """Position of each of them."""
    view_tokens: int
    position: int = 0
    """Position of its own turn."""
    header_tokens: int
    """Tokens of its own turn that were given."""
    answer: str
    """Name of its answer."""
    thought: str | None
    """Name of the message with thoughts and answer; None: it was decoded without thoughts."""
    submitted_s: float
    first_token_s: float | None
    """Time of its first token; None: it sampled none."""
    finished_s: float
    request: dict[str, str] = {}
    """Digests of everything it depends on: its view and how that was made, its header, its model, its sampling and,
    unless it is greedy, its seed. Empty: it cannot be repeated."""
    tokens: tuple[int, ...] | None
    """Sampled tokens, thoughts included; None: they are masked."""
    is_set: bool = False
    """Whether a fork has set its text, which may exceed `max_tokens` and has no thoughts."""
    sampled: int
    """Number of sampled tokens."""
    digest: str
    """Digest of the sampled tokens."""
    text: str | None
    """Text of the answer; None: it is masked."""
    finish_reason: str | None
    tokens_encoded: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    """Tokens that it was charged for (see `Usage`)."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Author, superstep, branch and call."""
        return self.author, self.superstep, self.branch, self.call


class RecordedNode(_Line):
    """An execution of a node that is not an agent."""

    kind: Literal["node"] = "node"
    run: int
    node: str
    """Name of the node, prefixed with its subgraphs."""
    step: int
    """LangGraph's number of its superstep."""
    branch: int
    outcome: Literal["result", "interrupt", "error"]
    began_s: float
    ended_s: float


class RecordedStep(_Line):
    """A forward pass, as far as it served the recording tenant."""

    kind: Literal["step"] = "step"
    at_s: float
    rows: int
    tokens: int
    """Tokens encoded, over all rows."""


class RecordedMemory(_Line):
    """Bytes of KV that the engine holds for the recording tenant; at most a few lines a second."""

    kind: Literal["memory"] = "memory"
    at_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class RunEnded(_Line):
    """End of a run."""

    kind: Literal["ran"] = "ran"
    run: int
    at_s: float
    outcome: Outcome
    error: str | None = None
    """Type of the error."""


class RecordingEnded(_Line):
    """Last line of a recording that was closed."""

    kind: Literal["end"] = "end"


Line = (
    RunStarted
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
    """Contents of a recording's file."""

    path: Path
    header: RecordingHeader
    lines: tuple[Line, ...]
    """Lines after the header, in order."""
    cut: str | None
    """Where it ends, if its process ended before it was closed."""

    @property
    def runs(self) -> tuple[RunStarted, ...]:
        return tuple(line for line in self.lines if isinstance(line, RunStarted))

    def ended(self, run: int) -> RunEnded | None:
        """Return how a run ended; None: the recording was cut before."""
        return next(iter(self._of(RunEnded, run)), None)

    def calls(self, run: int | None = None) -> list[RecordedCall]:
        """Return the calls of a run, or of all, in the order in which they ended."""
        return self._of(RecordedCall, run)

    def nodes(self, run: int | None = None) -> list[RecordedNode]:
        """Return the executions of other nodes likewise."""
        return self._of(RecordedNode, run)

    def steps(self) -> list[RecordedStep]:
        return [line for line in self.lines if isinstance(line, RecordedStep)]

    def _of(self, kind: type[OfRun], run: int | None) -> list[OfRun]:
        return [line for line in self.lines if isinstance(line, kind) and run in (None, line.run)]


def read_recording(path: str | Path) -> Recording:
    """Read a recording; a last line that a crashed process left unfinished is skipped.

    Raises:
        InvalidRequestError: It is no recording, damaged, or of another version.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        raise InvalidRequestError(f"there is no recording {str(path)!r}: engine.record(path) writes one")
    path = Path(path)
    *written, unfinished = path.read_bytes().split(b"\n")
    header = _header(path, written[0] if written else b"")
    lines = list[Line]()
    for number, line in enumerate(written[1:], start=2):
        try:
            lines.append(LINES.validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InvalidRequestError(f"line {number} of {str(path)!r} is damaged: {reason}") from None
    is_whole = bool(lines) and isinstance(lines[-1], RecordingEnded) and not unfinished
    cut = None if is_whole else f"it ends after line {len(written)}: the process ended before the recording was closed"
    return Recording(path, header, tuple(lines), cut)


def _header(path: Path, line: bytes) -> RecordingHeader:
    """Return the header in the first line; raises `InvalidRequestError` if it is none, or of another version."""
    try:
        version = _Version.model_validate_json(line).format
        if version != FORMAT:
            raise InvalidRequestError(
                f"{str(path)!r} has format {version!r}, but this version reads {FORMAT}: use the one that wrote it"
            )
        return RecordingHeader.model_validate_json(line)
    except ValidationError:
        raise InvalidRequestError(f"{str(path)!r} is not a recording: engine.record(path) writes one") from None
