"""The tasks that a nested graph stands in, named by their places: LangGraph's ids of them differ from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.graph.langgraph_internals import (
    branch_of,
    channel_values,
    hidden_in,
    is_nested,
    paths_around,
    place_in_superstep,
    superstep_of,
    task_path_of,
    with_hidden,
)

_AROUND = "around"


@dataclass(frozen=True)
class TaskPlace:
    """Where a task stands in the run of its graph."""

    name: str
    """The same in every run. Where nobody tells its place, LangGraph's id of it."""
    branch: int = 0
    """Which of several `Send` branches it is; 0 if it was not sent, or nobody knows."""


@dataclass(frozen=True)
class _Around:
    """What a compiled graph tells all that runs in it."""

    tasks: Mapping[str, TaskPlace]
    """The tasks around that have called a graph of ours, by LangGraph's paths."""
    home: str
    """The path of the task that has called this graph; empty: none has."""
    graphs: frozenset[str]
    """Those of its nodes that are graphs themselves."""


def with_tasks_around(config: RunnableConfig, called: RunnableConfig, graph: Any) -> RunnableConfig:
    """The config of a run whose nodes know the places of the tasks around.

    Args:
        config: As the graph was given it, and `called` as it runs with it.
        graph: Compiled, of ours.
    """
    tasks, home = dict(_around(called).tasks), ""
    if is_nested(called):
        home = task_path_of(called)
        tasks[home] = _place(called, graph)
    nodes = graph.builder.origin.nodes.items()
    graphs = frozenset(name for name, spec in nodes if isinstance(spec.runnable, CompiledStateGraph))
    return with_hidden(config, _AROUND, _Around(tasks, home, graphs))


def tasks_around(config: RunnableConfig) -> tuple[TaskPlace, ...]:
    """The tasks that a node's graph stands in, outermost first.

    Nobody tells the place of one that has called a graph of LangGraph's own. What LangGraph counts the graphs of one
    task by stands among them.
    """
    known = _around(config).tasks
    return tuple(known.get(path, TaskPlace(path.rpartition("|")[-1])) for path in paths_around(config))


def _around(config: RunnableConfig) -> _Around:
    found = hidden_in(config, _AROUND)
    return found if isinstance(found, _Around) else _Around({}, "", frozenset())


def _place(called: RunnableConfig, graph: Any) -> TaskPlace:
    """Of the task that calls a graph: which it is in its superstep, and in which that is.

    What is said in a graph that is a node itself comes into the handles of the graph around. They tell the superstep,
    also where somebody has gone back to an earlier state or edited it: LangGraph counts that, too.
    """
    path, around = task_path_of(called), _around(called)
    node = path.split("|")[-1].partition(":")[0]
    home = next(reversed([each for each in paths_around(called) if ":" in each.split("|")[-1]]), "")
    when = f"step {superstep_of(called)}"
    if home == around.home and node in around.graphs and "handles" in graph.output_channels:
        entries = channel_values(called, ["handles"]).get("handles") or []
        supersteps = [found for entry in entries if isinstance(found := entry.get("superstep"), int)]
        when = str(1 + max(supersteps, default=-1))
    return TaskPlace(f"{node} {when} {place_in_superstep(called)}", branch_of(called))
