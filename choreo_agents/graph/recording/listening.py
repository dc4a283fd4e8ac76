"""Who listens to a run: is asked before a call or a function of it is made, and told what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from langchain_core.runnables import RunnableConfig
from torch import Tensor

from choreo_agents.engine import Engine
from choreo_agents.graph.langgraph_internals import (
    branch_of,
    channel_values,
    hidden_in,
    resumed_with,
    superstep_of,
    with_hidden,
)
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.recording.packing import canonical
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

_LISTENER = "listener"
Look = Callable[[Tensor], None]


@dataclass(frozen=True)
class AskedCall:
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
    """Without a derived seed."""
    derived_seed: int
    """Which it gets if its sampling has none."""
    rest: tuple[Any, ...]
    """What else it depends on, JSON-plain: its header, how it thinks, its adapter, which tools it must call."""
    header: int
    """Tokens of its header."""
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

    def seed(self, told: int | None) -> int | None:
        """The seed that it decodes with; `told`: which it is to have in place of a derived one."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return self.derived_seed if told is None else told

    def digest(self, key: bytes, told: int | None) -> str:
        """Of all that what it says depends on, under a recording's key."""
        sampling = self.sampling.with_defaults(self.engine.model.sampling_defaults)
        asked = sampling.model_dump(mode="json", exclude={"seed", "forced", "n", "logprobs"})
        drawn = self.seed(told) if sampling.temperature > 0 else None
        return self.engine.record.digests(key).request(self.handles, self.offsets, self.end, [asked, drawn, *self.rest])


@dataclass(frozen=True)
class Cue:
    """What a call is told before it is made."""

    seed: int | None = None
    """In place of a derived one."""
    message: str | None = None
    """The id of its message."""
    tokens: tuple[int, ...] | None = None
    """What it says (see `PlayedCall`); None: it samples."""
    at_once: bool = False
    replaces: tuple[int, ...] | None = None
    """What it says in the place of that: taken as it is, at once."""
    look: Look | None = None
    """Is shown its logits."""
    known_as: Any = None
    """Whatever who has given the cue knows it by."""


@dataclass(frozen=True)
class SaidCall:
    """What came of a call."""

    message: str
    tokens: tuple[int, ...]
    """What was sampled, thoughts included."""
    words: str
    finish: str | None
    read: int
    """Tokens of its view."""
    handle: MessageHandle
    """Of the answer."""
    thought: MessageHandle | None
    """Of what was decoded to think it out, with the answer."""
    most: int
    """Tokens that it might sample of its answer."""
    first_s: float | None
    """When its first token was there; None: there was none."""


@dataclass(frozen=True)
class NodeExecution:
    """One execution of a node that is no agent."""

    node: str
    """Behind the subgraphs that it stands in."""
    step: int
    branch: int
    given: Any
    state: Mapping[str, Any]
    """The messages and entries of the graph's state."""
    config: RunnableConfig
    asked: Any
    """Its input, and with what it is resumed, as they were before it ran: JSON-plain, and the same in every run."""
    began_s: float
    """As `time.perf_counter` counts."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The same in every run of the same graph, but for branches of subgraphs."""
        return self.node, self.step, self.branch


@dataclass(frozen=True)
class Returned:
    """What a node is to return without being run."""

    value: Any


class Listener(Protocol):
    """Of one run. May be asked from any thread."""

    def cue(self, asked: AskedCall) -> Cue: ...

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None: ...

    def before(self, execution: NodeExecution) -> Returned | None:
        """What a node returns without being run; None: it is run. Raises what it is to raise."""
        ...

    def inside(self, execution: NodeExecution) -> Listener:
        """Who listens to what a node that is run calls."""
        ...

    def after(self, execution: NodeExecution, value: Any, inside: Listener) -> Any:
        """What a node that was run has returned: what the graph gets of it."""
        ...

    def failed(self, execution: NodeExecution, error: BaseException, inside: Listener) -> None: ...


def listener_in(config: RunnableConfig) -> Listener | None:
    """Who listens to the run that a config is of; None: nobody does."""
    found: Listener | None = hidden_in(config, _LISTENER)
    return found


def heard_by(config: RunnableConfig | None, listener: Listener) -> RunnableConfig:
    """A config whose run somebody listens to, and whatever it calls."""
    return with_hidden(config, _LISTENER, listener)


def execution_of(config: RunnableConfig, given: Any) -> NodeExecution:
    """What a node with this config does."""
    state = channel_values(config, ("messages", "handles"))
    asked, place = canonical([given, resumed_with(config)]), (superstep_of(config), branch_of(config))
    return NodeExecution(author_of(config), *place, given, state, config, asked, time.perf_counter())
