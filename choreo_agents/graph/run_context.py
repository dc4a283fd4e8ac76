"""All that serves a run: one value, hidden in the config of each of its nodes.

What a program asks of a run, its seed among that, stands in its `RunOptions`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from choreo_agents.engine import Engine, EphemeralRun
from choreo_agents.engine.recording.recorder import Digests
from choreo_agents.graph.audit.influence import Declared
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.langgraph_internals import hidden_in, with_hidden
from choreo_agents.graph.signer import Signer
from choreo_agents.graph.state import HandleEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

LineageChoice = BaseStore | Literal[False] | None
"""A store of LangGraph's; False: nothing is kept; None: as the run has it."""


# Who is asked before an agent's call, and told what came of calls and functions: whoever records or replays a run


@dataclass(frozen=True)
class CallRequest:
    """A call that an agent is about to make."""

    engine: Engine
    author: str
    superstep: int
    branch: int
    call: int
    step: int
    """LangGraph's number of the superstep."""
    handles: Sequence[MessageHandle]
    offsets: Sequence[int]
    end: int
    """What its view holds, where, and where its own message starts."""
    sampling: Sampling
    """With its seed."""
    told: Sequence[Any]
    """How its turn begins, JSON-plain: the tokens of its header, how it thinks, which tools it must call."""
    adapter: str | None
    lead: str
    """What stands between its header and its first word."""
    asked_s: float
    """As `time.perf_counter` counts."""
    confidential: bool
    thinks: bool

    @property
    def place(self) -> tuple[str, int, int, int]:
        """The same in every run of the same graph, but for branches of subgraphs."""
        return self.author, self.superstep, self.branch, self.call

    def request(self, digests: Digests) -> dict[str, str]:
        """Digests of all that what it says depends on, by what that is."""
        sampling = self.sampling.with_defaults(self.engine.model.sampling_defaults)
        asked: Mapping[str, Any] = {
            "turn": self.told,
            "model": self.engine.record.encoder(self.adapter),
            "sampling": sampling.model_dump(mode="json", exclude={"seed", "forced_token_ids", "n", "logprobs"}),
            "seed": self.sampling.seed if sampling.temperature > 0 else None,
        }
        return self.engine.record.digests(digests.key).request(self.handles, self.offsets, self.end, asked)


@dataclass(frozen=True)
class Answer:
    """What a call says, which is not asked for it."""

    tokens: tuple[int, ...]
    is_set: bool = False
    """Whether somebody wants it to say that, or has wanted it when it was recorded: it has not sampled it."""


@dataclass(frozen=True)
class CallResult:
    """What came of a call."""

    tokens: tuple[int, ...]
    """What was sampled, thoughts included."""
    words: str
    finish: str | None
    handle: MessageHandle
    """Of the answer."""
    thought: MessageHandle | None
    """Of what was decoded to think it out, with the answer."""
    first_s: float | None
    """When its first token was there; None: there was none."""
    answer: Answer | None
    """What it was to say."""


@dataclass(frozen=True)
class ReplayedNode:
    """One execution of a node that is no agent, as whoever listens has it."""

    value: Any = None
    """What it returns, if that is known: then it does not run."""
    is_known: bool = False
    keep: Callable[[Any], None] = lambda value: None
    """Told what it returned."""


@dataclass(frozen=True)
class RunListener:
    """Of one run. What it holds may be called from any thread."""

    answer: Callable[[CallRequest], Answer | None] | None = None
    """What a call is to say; None: the model is asked."""
    said: tuple[Callable[[CallRequest, CallResult], None], ...] = ()
    ran: Callable[[RunnableConfig, float, BaseException | None], None] | None = None
    """Told when a node that is no agent has run: with its config, when it began, as `time.perf_counter` counts, and
    how it has failed."""
    play: Callable[[Any, RunnableConfig], ReplayedNode] | None = None
    """Asked before a node that is no agent runs, with its input."""


# What a run knows of itself


@dataclass(frozen=True)
class TaskPlace:
    """Where a task stands in the run of its graph."""

    name: str
    """The same in every run. Where nobody tells its place, LangGraph's id of it."""
    branch: int = 0
    """The number of its `Send` branch; 0 if it was not sent, or nobody knows."""


Resolver = Callable[[RunnableConfig], str]
"""The salt of the tenant that a run is for: of what the service has authenticated, and never of a `configurable` value
that a client may write."""


@dataclass(frozen=True)
class RunTenant:
    """The tenant that a run is for."""

    salt: str = field(repr=False)
    thread: str | None = field(default=None, compare=False)
    """Of the outermost graph's run."""
    saver: Any = field(default=None, compare=False, repr=False)
    """What keeps its state, where the thread is known to be the tenant's."""

    @property
    def mark(self) -> str:
        """Name the tenant in checkpoints, whatever engine serves it; does not tell the salt."""
        return hmac.new(self.salt.encode(), b"choreo thread", hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True)
class ChartedRun:
    """What the outermost graph of ours has charted: all that its agents see, those of its subgraphs included."""

    home: str
    """Before which nodes it stands; empty: none."""
    declared: Declared
    on_violation: Mapping[str, OnViolation]
    """By the nodes that they stand in, as the chart names them, what graphs do about promises that would break."""

    def local(self, name: str) -> str | None:
        """Return a name as the chart has it; None: it is of no node in there."""
        prefix = f"{self.home}|" if self.home else ""
        return name.removeprefix(prefix) if name.startswith(prefix) else None


@dataclass(frozen=True)
class RunContext:
    """What a graph tells all that runs in it. Empty in graphs of LangGraph's own, and outside of any.

    LangGraph copies and merges configs, stores them and shows them; this goes along as it is, into nothing that is
    stored or shown, and no JSON that a client writes is one.
    """

    nodes: tuple[str, ...] = ()
    """The nodes around the graph, outermost first. This and what follows up to `given` are told as well by a node that
    is no agent, to all that it calls: the node is the last one then."""
    depth: int = 0
    """How many parts of LangGraph's name of a task these are."""
    tasks: tuple[TaskPlace, ...] = ()
    """Theirs. What LangGraph counts the graphs of one task by stands among them."""
    given: Sequence[HandleEntry] = ()
    """The entries of what was said around, whichever channels a graph's schema takes in."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Who serves the run, by the fingerprint of the model: those of the graphs around included."""
    twin: Callable[[Engine], Engine] = field(default=lambda engine: engine)
    """The engine that serves the run in the place of another, in all graphs and agents: mostly that itself."""
    tenant: RunTenant | None = None
    """For whom it is; None: nobody was named."""
    thread: str | EphemeralRun | None = None
    """What keeps all that is encoded, as the outermost graph of ours has it; None: there is no graph of ours."""
    lineage: LineageChoice = None
    """Where lineage is kept, as the same graph says."""
    signer: Signer | None = None
    """Who signs what is said; None: nobody, or whoever reads it."""
    charted: ChartedRun | None = None
    """What agents see of the graphs around theirs."""
    listening: RunListener = field(default_factory=RunListener)
    """Who records the run, or replays it; by default nobody."""

    @classmethod
    def of(cls, config: RunnableConfig) -> RunContext:
        """Read it from the config of a node, or of a call."""
        found = hidden_in(config)
        return found if isinstance(found, cls) else cls()

    def into(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return a config of the run that it serves."""
        return with_hidden(config, self)
