"""Identifies one call of one node in a LangGraph run, and reads the run's options.

Options come as one object, since clients of a service can write plain `configurable` values, and must not set these.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import (
    branch_of,
    channel_values,
    place_in_superstep,
    saver_of,
    superstep_of,
    task_path_of,
    task_token_of,
    thread_of,
)
from choreo_agents.graph.nesting import author_of, tasks_around
from choreo_agents.graph.run_context import TaskPlace
from choreo_agents.graph.state import channel_in

Replay = Mapping[tuple[str, int, int, int], tuple[int, ...] | None]
"""Tokens by (author, superstep, branch, call): a run given one decodes just these, at the full price of each step;
freely where it has None."""

LogitsCallbacks = Callable[[str, int, int, int], Callable[[Any], None] | None]
"""Returns the callback for the call (author, superstep, branch, call); it gets the logits before each token (see
`Decode`)."""

_KEY = "choreo"
_counts: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""Number of calls that each task has made, by an object that LangGraph makes anew whenever it runs a task."""
_counts_lock = threading.Lock()


@refuses_unknown()
@dataclass(frozen=True)
class RunOptions:
    """Options of one run, in `config["configurable"]["choreo"]`. Clients of a service cannot set them: JSON cannot
    carry the object.

    `app.invoke(given, {"configurable": {"choreo": RunOptions(seed=4)}})`
    """

    seed: int | None = None
    """Seed from which those of calls without one are derived; None: the engine's."""
    replay: Replay | None = None
    """Tokens to force."""
    logits_callback: LogitsCallbacks | None = None
    """Callbacks that get the logits of each call."""
    trace_confidential: bool = False
    """True to show callbacks the views of agents with all confidential text."""
    regenerate: bool = False
    """True to decode again although the thread has the answer to the same view in the same place. The new answer
    replaces that one. Agents draw as they drew before: give another `seed` for other answers."""

    def __post_init__(self) -> None:
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InvalidRequestError(f"the seed of a run must be an integer, not {self.seed!r}")


def options_of(config: RunnableConfig) -> RunOptions:
    """Return the options of a node's run.

    Raises:
        InvalidRequestError: They are given as plain value, which a client might have written.
    """
    configurable = config.get("configurable") or {}
    options = configurable.get(_KEY, RunOptions())
    plain = [field.name for field in fields(RunOptions) if field.name in configurable]
    if plain or not isinstance(options, RunOptions):
        value = {name: configurable[name] for name in plain} or {_KEY: options}
        raise InvalidRequestError(
            f"configurable has {value!r}: options of a run must be one RunOptions object, which clients cannot write: "
            f'pass {{"configurable": {{"{_KEY}": choreo_agents.RunOptions(seed=..., replay=..., ...)}}}}'
        )
    return options


@dataclass(frozen=True, kw_only=True)
class CallId(RunOptions):
    """Identity of one call in one execution of one node, with its run's options; the same again if LangGraph reruns the
    node."""

    agent: str
    author: str
    """The node's path: `team|judge`."""
    thread: str | None
    """The thread that keeps the run's state; None: no checkpointer keeps it."""
    task: str
    """LangGraph's task, behind those of the graphs around it: unique among all runs."""
    around: tuple[TaskPlace, ...]
    """The tasks of the graphs around it."""
    step: int | None
    """LangGraph's number of the superstep, for an agent that a function calls: its message may not be in the state."""
    sees_all: bool
    """True if it was given all messages of the graph's state, so that our superstep number identifies the time."""
    path: str
    """Its task among those of the superstep."""
    branch: int
    call: int
    """Number of the call among those that the node makes."""

    @classmethod
    def of(cls, config: RunnableConfig, agent: str, state: Any = None, *, node: str | None = None) -> CallId:
        """Read it from a node's config; outside LangGraph all fields have defaults. Raises as `options_of` does.

        Args:
            config: The node's config.
            agent: The agent that makes the call.
            state: The state that it was given.
            node: The node's name, if the agent itself is a node of a `ChoreoGraph`; None if a function calls it.
        """
        task, is_node, options = task_path_of(config), node is not None, options_of(config)
        return cls(
            **{field.name: getattr(options, field.name) for field in fields(RunOptions)},
            agent=agent,
            author=author_of(config, node) or agent,
            thread=None if saver_of(config) is None else thread_of(config),
            task=task,
            around=tasks_around(config),
            step=None if is_node or not task else superstep_of(config),
            sees_all=is_node or not task or _has_graph_state(state, config),
            path=place_in_superstep(config),
            branch=branch_of(config),
            call=_next_call(task_token_of(config)),
        )

    def next_call(self, config: RunnableConfig) -> CallId:
        """Return the id of the next call that the node with this config makes."""
        return replace(self, call=_next_call(task_token_of(config)))

    @property
    def node(self) -> str:
        """The node's own name."""
        return self.author.split("|")[-1]

    def at(self, superstep: int) -> str:
        """Return the name of the call within its thread: the same in every run of the same graph."""
        return " ".join([*self._tasks, f"{self.author} {superstep} {self.branch} {self.call}"])

    def call_seed(self, engine_seed: int, superstep: int) -> int:
        """Return the call's seed: the same in every run of the same graph with the same run seed."""
        run_seed = engine_seed if self.seed is None else self.seed
        around = " ".join(self._tasks)
        place = f"{run_seed} {around} {self.author} {self.agent} {superstep} {self.branch} {self.call}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")

    def idempotency_key(self, superstep: int) -> str | None:
        """Return a key under which the call finds its answer if it is made again; None outside LangGraph.

        In a kept thread it is made of the call's place, which is the same when LangGraph goes back to an earlier state
        or forks from one; an agent that a function calls on a state of its own adds LangGraph's superstep, since the
        thread goes on. Without a thread it is made of LangGraph's task: only task ids differ between two runs.

        Args:
            superstep: Our number of the superstep of the answer.
        """
        if not self.task:
            return None
        if self.thread is None:
            return repr((self.task, self.agent, self.call))
        return repr((self.thread, *self._place(superstep, None if self.sees_all else self.step)))

    def message_id(self, superstep: int) -> str:
        """Return the id of the call's message: the same again if LangGraph reruns the node, different for any other
        branch or call.

        A thread that went back to an earlier state reuses the ids: its state has none of the messages that followed.
        """
        if not self.task:
            return str(uuid.uuid4())
        name = self.task if self.thread is None else self.thread
        return str(uuid.uuid5(uuid.NAMESPACE_OID, repr((name, *self._place(superstep, self.step)))))

    def _place(self, superstep: int, step: int | None) -> tuple[Any, ...]:
        return self._tasks, self.author, self.agent, superstep, step, self.path, self.call

    @property
    def _tasks(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.around)


def _has_graph_state(state: Any, config: RunnableConfig) -> bool:
    """Return whether an agent was given all messages of its graph's state, and not a selection."""
    values = channel_values(config, ["handles", "messages"])
    return "handles" in values and _message_ids(values) == _message_ids(state)


def _message_ids(state: Any) -> list[set[Any]]:
    entries, messages = (channel_in(state, name) or [] for name in ("handles", "messages"))
    named = {entry.get("message_id") for entry in entries if isinstance(entry, Mapping)}
    return [named, {getattr(message, "id", None) for message in messages}]


def _next_call(task: Any) -> int:
    if task is None:
        return 0
    with _counts_lock:
        return next(_counts.setdefault(task, itertools.count()))
