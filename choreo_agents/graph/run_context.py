"""Context of a run: engines, thread, tenant, signer and listener, hidden in the config of each of its nodes.

Options that a caller sets, such as the seed, are `RunOptions`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from choreo_agents.engine import Engine, EphemeralRun
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.recording.recorder import Digests
from choreo_agents.graph.audit.chart import Chart, OnViolation
from choreo_agents.graph.langgraph_internals import hidden_in, with_hidden
from choreo_agents.graph.state import HandleEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

if TYPE_CHECKING:
    from choreo_agents.graph.signer import Signer

LineageChoice = BaseStore | Literal[False] | None
"""A LangGraph store; False: lineage is not kept; None: the store of the run."""


# Listeners, which record or replay a run: called before an agent's call, and after calls and functions


class CallPlace(NamedTuple):
    """Id of a call: the same in every run of a graph, except for branches of subgraphs, which share it."""

    author: str
    superstep: int
    branch: int
    call: int

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class CallRequest:
    """A call that an agent is about to make."""

    engine: Engine
    place: CallPlace
    step: int
    """LangGraph's number of the superstep."""
    handles: Sequence[MessageHandle]
    """Messages of its view, at positions `offsets`; its own message starts at `end`."""
    offsets: Sequence[int]
    end: int
    sampling: Sampling
    """Sampling with the seed of the call."""
    turn: Sequence[Any]
    """Beginning of its turn, as plain JSON: header tokens, thinking, tool choice."""
    adapter: str | None
    lead: str
    """Text between header and answer."""
    asked_s: float
    """`time.perf_counter` of the request."""
    confidential: bool
    thinks: bool

    @property
    def view(self) -> list[Message]:
        """Messages of its view."""
        return self.engine.record.messages(self.handles)

    def request(self, digests: Digests) -> dict[str, str]:
        """Return digests of all that determines the answer, by kind: turn, model, sampling, seed, view."""
        sampling = self.sampling.with_defaults(self.engine.model.sampling_defaults)
        parts: Mapping[str, Any] = {
            "turn": self.turn,
            "model": self.engine.record.encoder(self.adapter),
            "sampling": sampling.model_dump(mode="json", exclude={"seed", "forced_token_ids", "n", "logprobs"}),
            "seed": self.sampling.seed if sampling.temperature > 0 else None,
        }
        return digests.request(self.view, self.offsets, self.end, parts)


@dataclass(frozen=True)
class Answer:
    """Predetermined answer of a call."""

    tokens: tuple[int, ...]
    is_set: bool = False
    """Whether a fork set it, now or when it was recorded, instead of sampling it."""


@dataclass(frozen=True)
class CallResult:
    """Result of a call."""

    tokens: tuple[int, ...]
    """Sampled tokens, thoughts included."""
    words: str
    finish: str | None
    handle: MessageHandle
    """Handle of the answer."""
    thought: MessageHandle | None
    """Handle of thoughts and answer as decoded."""
    first_s: float | None
    """`time.perf_counter` at the first token; None: there was none."""
    answer: Answer | None
    """Answer that was predetermined, if any."""


@dataclass
class NodeRun:
    """One execution of a plain node, as its listener sees it."""

    value: Any = None
    """Its output."""
    is_known: bool = False
    """True if a listener has set the output: the node does not run then."""


@dataclass(frozen=True)
class RunListener:
    """Callbacks of one run's recorder or replay; they may be called from any thread."""

    answer: Callable[[CallRequest], Answer | None] | None = None
    """Returns the predetermined answer of a call; None: the model samples it."""
    on_call: tuple[Callable[[CallRequest, CallResult], None], ...] = ()
    """Called after each call of an agent."""
    around_node: Callable[[Any, RunnableConfig], AbstractContextManager[NodeRun]] | None = None
    """Block in which a plain node runs, from its input and config."""


# The context of a run


@dataclass(frozen=True)
class TaskPlace:
    """Place of a task in the run of its graph."""

    name: str
    """Name that is the same in every run; LangGraph's task id if there is none."""
    branch: int = 0
    """Number of its `Send` branch; 0 if it was not sent, or it is unknown."""


Resolver = Callable[[RunnableConfig], str]
"""Function from a run's config to its tenant's salt. It must use what the service authenticated, never a
`configurable` value that a client can set."""


@dataclass(frozen=True)
class RunTenant:
    """The tenant that a run is for."""

    salt: str = field(repr=False)
    thread: str | None = field(default=None, compare=False)
    """Thread of the outermost graph's run."""
    saver: Any = field(default=None, compare=False, repr=False)
    """Checkpointer, if the thread was verified to be the tenant's."""

    @property
    def mark(self) -> str:
        """The tenant's name in checkpoints: a MAC that does not reveal the salt, the same for all engines."""
        return hmac.new(self.salt.encode(), b"choreo thread", hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True)
class ChartedRun:
    """Chart of the outermost Choreo graph: all that its agents see, those of subgraphs included."""

    home: str
    """Nodes around the graph, as a prefix of names; empty: none."""
    chart: Chart
    on_violation: Mapping[str, OnViolation]
    """Policies of graphs for violated promises, by the graphs' nodes in the chart."""

    def local(self, name: str) -> str | None:
        """Return the chart's name of a node; None: it is not in the chart."""
        prefix = f"{self.home}|" if self.home else ""
        return name.removeprefix(prefix) if name.startswith(prefix) else None


@dataclass(frozen=True)
class RunContext:
    """Context that a graph hands to all that runs in it. Empty in stock LangGraph graphs, and outside of graphs.

    LangGraph copies, merges, stores and shows configs. This value is passed along unchanged, is neither stored nor
    shown, and cannot be forged by a client's JSON.
    """

    nodes: tuple[str, ...] = ()
    """Nodes around the graph, outermost first. This and the fields up to `given` are also set by a plain node for what
    it calls; it is the last node then."""
    depth: int = 0
    """Number of parts that these nodes have in LangGraph's checkpoint namespace."""
    tasks: tuple[TaskPlace, ...] = ()
    """Places of these nodes' tasks, with LangGraph's counters of several graphs in one task."""
    outer_entries: Sequence[HandleEntry] = ()
    """Entries of the outer graph's messages, whichever channels the graph's own schema has."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Engines of the run by model fingerprint, those of outer graphs included."""
    twin: Callable[[Engine], Engine] = field(default=lambda engine: engine)
    """Maps an engine to the one that serves this run in its place, in all graphs and agents."""
    tenant: RunTenant | None = None
    """Tenant of the run; None: no tenant was named."""
    thread: str | EphemeralRun | None = None
    """Thread of the outermost Choreo graph, which leases all KV; None: there is no such graph."""
    lineage: LineageChoice = None
    """Lineage store of the same graph."""
    signer: Signer | None = None
    """Signer of messages; None: there is none, and readers verify with their own."""
    charted: ChartedRun | None = None
    """Chart of the outer graphs."""
    listener: RunListener = field(default_factory=RunListener)
    """Listener that records or replays the run; by default none."""

    @classmethod
    def of(cls, config: RunnableConfig) -> RunContext:
        """Return the context in the config of a node or a call; an empty one if it has none."""
        context = hidden_in(config)
        return context if isinstance(context, cls) else cls()

    def into(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return a config with this context."""
        return with_hidden(config, self)
