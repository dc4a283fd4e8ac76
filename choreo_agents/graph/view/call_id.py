"""Where in a LangGraph run a node's call stands, and what a program may ask of that run. Clients write `configurable`
values too, and must not."""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
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

Replay = Mapping[tuple[str, int, int, int], tuple[int, ...] | None]
"""Tokens by (author, superstep, branch, call): a run given one decodes just these, at the full price of each step;
freely where it has None."""

LogitsCallbacks = Callable[[str, int, int, int], Callable[[Any], None] | None]
"""For (author, superstep, branch, call), what is shown the logits before each of its tokens (see `Decode`)."""

_PLACE = "choreo"
_PLAIN = ("seed", "replay", "logits_callback", "trace_confidential", "regenerate")
_counts: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""The calls of each task so far, by an object that LangGraph makes anew whenever it runs a task."""
_counts_lock = threading.Lock()


@refuses_unknown()
@dataclass(frozen=True)
class RunOptions:
    """Options of one run, as `config["configurable"]["choreo"]`. JSON cannot carry it: no client of a service can.

    `app.invoke(given, {"configurable": {"choreo": RunOptions(seed=4)}})`
    """

    seed: int | None = None
    """From which the seeds of calls without one are derived; None: the engine's."""
    replay: Replay | None = None
    """Tokens to force."""
    logits_callback: LogitsCallbacks | None = None
    """Who is shown the logits of each call."""
    trace_confidential: bool = False
    """Whether callbacks are shown what agents read in all its words, those included that are confidential."""
    regenerate: bool = False
    """Whether agents are asked again though their thread knows what they have answered to the same view in the same
    place. The new answer takes the place of that. They draw as they drew before: another `seed` has them say something
    else."""

    def __post_init__(self) -> None:
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InvalidRequestError(f"the seed of a run must be an integer, not {self.seed!r}")


def options_of(config: RunnableConfig) -> RunOptions:
    """The options of the run that a node's config is of.

    Raises:
        InvalidRequestError: They are given as plain values, which a client might have written.
    """
    configurable = config.get("configurable") or {}
    found = configurable.get(_PLACE, RunOptions())
    plain = [name for name in _PLAIN if name in configurable]
    if plain or not isinstance(found, RunOptions):
        given = {name: configurable[name] for name in plain} or {_PLACE: found}
        raise InvalidRequestError(
            f"configurable has {given!r}: options of a run are taken from one object only, which clients cannot write: "
            f'give {{"configurable": {{"{_PLACE}": choreo_agents.RunOptions(seed=..., replay=..., ...)}}}}'
        )
    return found


@dataclass(frozen=True, kw_only=True)
class CallId(RunOptions):
    """Names one call in one execution of one node, with its run's options; the same again if LangGraph reruns it."""

    agent: str
    author: str
    """The node, behind the subgraphs that it stands in: `team|judge`."""
    thread: str | None
    """In which the run's state is kept; None: in none."""
    task: str
    """LangGraph's task, behind those of the graphs around it: no other run has the same."""
    around: tuple[TaskPlace, ...]
    """The tasks of the graphs around it."""
    step: int | None
    """LangGraph's number of the superstep, for an agent that a function calls: what it says may not be in the state."""
    sees_all: bool
    """Whether it was given what the graph's state has of what was said, so that our superstep tells when."""
    path: str
    """Which task of its superstep it is."""
    branch: int
    call: int
    """Which call this is of those that the node makes."""

    @classmethod
    def of(cls, config: RunnableConfig, agent: str, given: Any = None, *, node: str | None = None) -> CallId:
        """Read it from a node's config; outside LangGraph all of it is default. Raises what `options_of` raises.

        Args:
            config: The node's.
            agent: Whose call it is.
            given: The state that it was given.
            node: Its name, if the agent is a node of a graph of ours itself, and not called by a function.
        """
        task, is_node, options = task_path_of(config), node is not None, options_of(config)
        return cls(
            **{each.name: getattr(options, each.name) for each in fields(RunOptions)},
            agent=agent,
            author=author_of(config, node) or agent,
            thread=None if saver_of(config) is None else thread_of(config),
            task=task,
            around=tasks_around(config),
            step=None if is_node or not task else superstep_of(config),
            sees_all=is_node or not task or _is_graphs(given, config),
            path=place_in_superstep(config),
            branch=branch_of(config),
            call=_next_call(task_token_of(config)),
        )

    def next_call(self, config: RunnableConfig) -> CallId:
        """Of the next call that the node with this config makes."""
        return replace(self, call=_next_call(task_token_of(config)))

    @property
    def node(self) -> str:
        """The node's own name."""
        return self.author.split("|")[-1]

    def at(self, superstep: int) -> str:
        """Names the call within its thread: the same in every run of the same graph."""
        return " ".join([*self._tasks, f"{self.author} {superstep} {self.branch} {self.call}"])

    def call_seed(self, engine_seed: int, superstep: int) -> int:
        """Seed of the call: the same in every run of the same graph with the same run seed."""
        run_seed = engine_seed if self.seed is None else self.seed
        around = " ".join(self._tasks)
        place = f"{run_seed} {around} {self.author} {self.agent} {superstep} {self.branch} {self.call}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")

    def idempotency_key(self, superstep: int) -> str | None:
        """Names the call, so that it finds its answer if it is made again; None outside LangGraph.

        In a kept thread by its place, which is the same when LangGraph goes back to an earlier state or forks from one;
        what a function asks over a state of its own, while the thread goes on.
        Elsewhere by LangGraph's task: nothing but the ids of tasks tells two runs apart.

        Args:
            superstep: Ours, of what it says.
        """
        if not self.task:
            return None
        if self.thread is None:
            return repr((self.task, self.agent, self.call))
        return repr((self.thread, *self._place(superstep, None if self.sees_all else self.step)))

    def message_id(self, superstep: int) -> str:
        """Of what the call says: the same again if LangGraph reruns the node, never shared by two branches or calls.

        A state that a thread went back to has nothing yet of what followed: what is said from there on takes its ids.
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


def _is_graphs(given: Any, config: RunnableConfig) -> bool:
    """Whether an agent was given what its graph's state has of what was said: then it stands behind all of that."""
    known = channel_values(config, ["handles", "messages"])
    return "handles" in known and _said(known) == _said(given)


def _said(state: Any) -> list[set[Any]]:
    read = state.get if isinstance(state, Mapping) else partial(getattr, state)
    entries, messages = (read(name, None) or [] for name in ("handles", "messages"))
    named = {each.get("message_id") for each in entries if isinstance(each, Mapping)}
    return [named, {getattr(each, "id", None) for each in messages}]


def _next_call(task: Any) -> int:
    if task is None:
        return 0
    with _counts_lock:
        return next(_counts.setdefault(task, itertools.count()))
