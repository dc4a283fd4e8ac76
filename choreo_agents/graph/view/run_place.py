"""Where in a LangGraph run a node's call stands."""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig

from choreo_agents.graph.langgraph_internals import author_of, branch_of, task_path_of, task_token_of
from choreo_agents.graph.view.run_options import Replay, Watch, options_of

_counts: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""The calls of each task so far, by an object that LangGraph makes anew whenever it runs a task."""
_counts_lock = threading.Lock()


@dataclass(frozen=True)
class RunPlace:
    """Names one call in one execution of one node; the same again if LangGraph reruns the node."""

    agent: str
    author: str
    """The node, behind the subgraphs that it stands in: `team|judge`."""
    thread: str
    task: str
    """LangGraph's task, behind those of the graphs around it."""
    branch: int
    call: int
    """Which call this is of those that the node makes."""
    seed: int | None
    """Of the run; this and what follows as in `RunOptions`."""
    replay: Replay | None
    watch: Watch | None = None
    trace_confidential: bool = False

    @classmethod
    def of(cls, config: RunnableConfig, agent: str) -> RunPlace:
        """Read it from a node's config; outside LangGraph all of it is default. Raises what `options_of` raises."""
        configurable, options = config.get("configurable") or {}, options_of(config)
        return cls(
            agent=agent,
            author=author_of(config, agent),
            thread=str(configurable.get("thread_id", "")),
            task=task_path_of(config),
            branch=branch_of(config),
            call=_next_call(task_token_of(config)),
            seed=options.seed,
            replay=options.replay,
            watch=options.watch,
            trace_confidential=options.trace_confidential,
        )

    @property
    def node(self) -> str:
        """The node's own name."""
        return self.author.split("|")[-1]

    def at(self, superstep: int) -> str:
        """Names the call within its thread: the same in every run of the same graph."""
        return f"{self.author} {superstep} {self.branch} {self.call}"

    def call_seed(self, engine_seed: int, superstep: int) -> int:
        """Seed of the call: the same in every run of the same graph with the same run seed.

        Inside a subgraph it also depends on the tasks around, whose ids differ from run to run: LangGraph does not
        tell a subgraph which of several `Send` branches it is, and branches must not all draw the same.
        """
        run_seed = engine_seed if self.seed is None else self.seed
        around = self.task.rpartition("|")[0]
        place = f"{run_seed} {around} {self.author} {self.agent} {superstep} {self.branch} {self.call}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")

    def call_name(self) -> str | None:
        """Names the call, so that a rerun finds its answer; None outside LangGraph."""
        return f"{self.thread} {self.task} {self.agent} {self.call}" if self.task else None

    def message_id(self, superstep: int) -> str:
        """Of what the call says: the same again if LangGraph reruns the node, never shared by two branches or calls."""
        name = self.call_name() or str(uuid.uuid4())
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {superstep} {self.branch}"))


def _next_call(task: Any) -> int:
    if task is None:
        return 0
    with _counts_lock:
        return next(_counts.setdefault(task, itertools.count()))
