"""What a recording holds: each line is one of these, as JSON.

    header    the engine, and what its bits depend on
    run       a run of a graph begins: its thread, its input, its seed
    message   what a call reads or has made, before the first line that names it
    call      an agent has spoken
    node      a function, a tool or a model of somebody else's has returned
    step      a forward pass, of a recording whose bits can be compared
    memory    how much KV lies where
    ran       a run is over
    end       the recording was closed; without it, its process ended before

Digests are made under a key that is not in the file (see `digests`). Times are seconds since the recording began.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

FORMAT = 3
Origin = Literal["given", "said", "thought", "mapped"]
"""Where a message comes from: it was encoded as it was given, decoded, decoded to think an answer out, or its KV was
computed of another's."""
Outcome = Literal["done", "interrupted", "failed", "left"]
"""How a run ended: by itself, at an interrupt, with an error, or since nobody took more of what it gave."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _required(conditions: dict[str, str]) -> dict[str, str]:
    """Those without which nothing can be played."""
    if {"model", "method", "threads"} <= conditions.keys() and conditions["threads"].isdecimal():
        return conditions
    raise ValueError("its conditions do not say the model, the method and the number of threads")


class RecordingHeader(_Line):
    """The first line."""

    kind: Literal["header"] = "header"
    format: int = FORMAT
    model: str
    """Its name or folder."""
    conditions: Annotated[dict[str, str], AfterValidator(_required)]
    """What the bits of a run depend on, by what it is called: the model's fingerprint, torch, threads, ..."""
    seed: int
    """The engine's."""
    step_tokens: int
    rows: int
    kv_budget_bytes: int | None
    """As the engine was told."""
    bytes_per_token: int
    """Of its model's KV."""
    adapters: dict[str, str] = {}
    """Folders, by the names that calls use."""
    adapter: str | None = None
    """The name of that which calls have by default."""
    bits: bool
    """Whether it has digests of logits, and every step."""
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
    kept: bool
    """Whether a checkpointer keeps its state."""
    seed: int | None
    """As in `RunOptions`."""
    given: str | None
    """The input, packed (see `graph.recording.packing`); None: it is masked, or cannot be written."""
    before: str | None
    """A digest of the state that the thread was in; None: in none."""
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
    message: str
    """The message's id."""
    model: str
    """Fingerprint of the model."""
    seed: int | None
    """Which the call was given."""
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
    most: int
    """Tokens that it might sample of its answer."""
    asked_s: float
    first_s: float | None
    """When its first token was there; None: it sampled none."""
    said_s: float
    request: str
    """A digest of all that it depends on: its view and what that was made of, its header, its sampling and, unless the
    likeliest token is taken, its seed."""
    tokens: tuple[int, ...] | None
    """What was sampled, thoughts included; None: it is masked."""
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
    logits: tuple[str, ...] | None = None
    """A digest of the logits before each token that was sampled."""

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
    given: str
    """A digest of its input."""
    outcome: Literal["result", "interrupt", "error"]
    result: str | None
    """What it returned, or what it asked at an interrupt, packed; of an error, what kind. None: it is masked, or cannot
    be written."""
    masked: bool = False
    """Whether it is left out since it might tell confidential words."""
    calls: int = 0
    """Calls of agents that it made itself, which are no part of the recording."""
    began_s: float
    ended_s: float

    @property
    def place(self) -> tuple[str, int, int]:
        """Node, superstep and branch."""
        return self.node, self.step, self.branch


class RecordedStep(_Line):
    """A forward pass: of each row, the name of its request and how many of its tokens were encoded."""

    kind: Literal["step"] = "step"
    rows: tuple[tuple[str, int, int], ...]
    """Name, number among those of one name, tokens."""
    others: bool = False
    """Whether rows of other tenants were among them."""
    at_s: float = 0.0


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
    state: str | None
    """A digest of the state that it ended in; None: nobody has seen it."""
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
