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

from choreo_agents.engine import Engine, UnkeptRun
from choreo_agents.graph.audit.labels import Declared
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.langgraph_internals import hidden_in, with_hidden
from choreo_agents.graph.listening import Listening
from choreo_agents.graph.signer import Signer
from choreo_agents.graph.state import HandleEntry

LineageChoice = BaseStore | Literal[False] | None
"""A store of LangGraph's; False: nothing is kept; None: as the run has it."""


@dataclass(frozen=True)
class TaskPlace:
    """Where a task stands in the run of its graph."""

    name: str
    """The same in every run. Where nobody tells its place, LangGraph's id of it."""
    branch: int = 0
    """The number of its `Send` branch; 0 if it was not sent, or nobody knows."""


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
class Charted:
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
    thread: str | UnkeptRun | None = None
    """What keeps all that is encoded, as the outermost graph of ours has it; None: there is no graph of ours."""
    lineage: LineageChoice = None
    """Where lineage is kept, as the same graph says."""
    signer: Signer | None = None
    """Who signs what is said; None: nobody, or whoever reads it."""
    charted: Charted | None = None
    """What agents see of the graphs around theirs."""
    listening: Listening = field(default_factory=Listening)
    """Who records the run, or replays it; by default nobody."""

    @classmethod
    def of(cls, config: RunnableConfig) -> RunContext:
        """Read it from the config of a node, or of a call."""
        found = hidden_in(config)
        return found if isinstance(found, cls) else cls()

    def into(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return a config of the run that it serves."""
        return with_hidden(config, self)
