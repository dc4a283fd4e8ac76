"""Tracks where a node runs: the nodes and tasks of the graphs around it. Also reports function calls to listeners.

Each node of a `ChoreoGraph` knows its name from compile time, and tells what runs inside it. LangGraph's names of tasks
are used only for nodes of stock graphs, which tell nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import set_config_context
from langgraph.errors import ParentCommand
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.langgraph_internals import (
    AroundNode,
    branch_of,
    channel_values,
    is_nested,
    nodes_behind,
    place_in_superstep,
    superstep_of,
    task_parts_of,
)
from choreo_agents.graph.run_context import NodeRun, RunContext, TaskPlace
from choreo_agents.graph.state import channel_in, merge_entries
from choreo_agents.graph.visibility import REENCODED

NodeCall = tuple[RunnableConfig, Context, NodeRun]
"""One call of a node: its config, the context it runs in, and its output, if that is known."""


def path_of(config: RunnableConfig) -> tuple[str, ...]:
    """Return the node that runs with this config, behind those around its graph; empty outside LangGraph."""
    context = RunContext.of(config)
    return (*context.nodes, *nodes_behind(config, context.depth))


def author_of(config: RunnableConfig, node: str | None = None) -> str:
    """Return the author of what a node with this config says: `team|judge`.

    Args:
        config: The node's.
        node: Its name, if it is one of a graph of ours, and knows that.
    """
    return "|".join(path_of(config) if node is None else (*RunContext.of(config).nodes, node))


def tasks_around(config: RunnableConfig) -> tuple[TaskPlace, ...]:
    """Return the tasks that a node's graph stands in, outermost first."""
    context = RunContext.of(config)
    return (*context.tasks, *map(TaskPlace, task_parts_of(config)[context.depth :]))[:-1]


def in_graph(called: RunnableConfig) -> RunContext:
    """Return the context for a run of a graph called with this config, in which its nodes know their path."""
    context, parts = RunContext.of(called), task_parts_of(called)
    if not is_nested(called):
        return replace(context, nodes=(), depth=0, tasks=(), outer_entries=())
    # A node of a `ChoreoGraph` has added its task to the context; one of a stock graph has not.
    is_told = len(parts) == context.depth
    tasks = context.tasks if is_told else (*tasks_around(called), _task_place(called, path_of(called)[-1]))
    return replace(context, nodes=path_of(called), depth=len(parts), tasks=tasks)


@contextmanager
def _as_it_is(state: Any, config: RunnableConfig) -> Iterator[NodeCall]:
    yield config, copy_context(), NodeRun()


def wrapped(
    node: Any,
    around: Callable[[Any, RunnableConfig], AbstractContextManager[NodeCall]] = _as_it_is,
    finish: Callable[[Any, RunnableConfig], Any] = lambda result, config: result,
    **options: Any,
) -> AroundNode:
    """Wrap a node or a route that is no agent.

    Args:
        node: The node.
        around: Entered around each call of it, with its input and config.
        finish: Returns the result of the whole, given the node's result and its config.
        **options: Options of the node's `invoke`.
    """

    def run(state: Any, config: RunnableConfig) -> Any:
        with around(state, config) as (within, context, node_run):
            if not node_run.is_known:
                node_run.value = context.run(node.invoke, state, within, **options)
        return finish(node_run.value, config)

    async def arun(state: Any, config: RunnableConfig) -> Any:
        with around(state, config) as (within, context, node_run):
            if not node_run.is_known:
                call = node.ainvoke(state, within, **options)
                node_run.value = await asyncio.create_task(call, context=context)
        return finish(node_run.value, config)

    return AroundNode(node, run, arun)


def placed_node(node: Any, name: str, sign: Callable[[Any, RunnableConfig], Any], *, holds_agents: bool) -> AroundNode:
    """Wrap a node that is no agent, so that all that it calls knows its path, and its updates are signed.

    Args:
        node: The node.
        name: Its name.
        sign: Signs the updates it writes.
        holds_agents: True if it is a graph, or holds one, whose agents see the node's input, and whose nodes the run's
            listener observes one by one.
    """
    graph = node if isinstance(node, CompiledStateGraph) and "handles" in node.channels else None
    # Messages leave the subgraph with their handles, whichever channels its output schema has.
    puts_out: Any = () if graph is None else graph.output_channels
    out: Any = {}
    if not isinstance(puts_out, str) and "messages" in puts_out:
        out = {"output_keys": [*dict.fromkeys([*puts_out, "handles"])]}

    @contextmanager
    def placed(state: Any, config: RunnableConfig) -> Iterator[NodeCall]:
        entries = (channel_in(state, "handles") if holds_agents else None) or []
        if any(entry.get("select") == REENCODED.name for entry in entries):
            raise VisibilityError(
                f"a send passes messages to {name!r} as {REENCODED.name!r}, but it is a graph, whose agents see what "
                f"is declared to it: set their visibility to {name!r} to {REENCODED.name!r}, and send them shared"
            )
        place = _task_place(config, name, says_there=graph is not None)
        outer, depth = RunContext.of(config), len(task_parts_of(config))
        around = merge_entries([*outer.outer_entries], entries) if holds_agents else ()
        tasks = (*tasks_around(config), place)
        within = replace(outer, nodes=(*outer.nodes, name), depth=depth, tasks=tasks, outer_entries=around).into(config)
        try:
            # Also set it as the ambient config: the node may call a graph without passing its config on.
            with (
                set_config_context(within) as context,
                (_as_it_is if holds_agents else observed)(state, within) as call,
            ):
                yield within, context, call[-1]
        except ParentCommand as sent:
            # `Command(graph=Command.PARENT)` inside the node is raised, not returned: sign its update here.
            sent.args = (sign(sent.args[0], config),)
            raise

    return wrapped(node, placed, sign, **out)


@contextmanager
def observed(state: Any, config: RunnableConfig) -> Iterator[NodeCall]:
    """Let the run's listener replay a call of a node, and learn when it ran."""
    listens = RunContext.of(config).listener.around_node
    with nullcontext(NodeRun()) if listens is None else listens(state, config) as node_run:
        yield config, copy_context(), node_run


def _task_place(config: RunnableConfig, node: str, *, says_there: bool = False) -> TaskPlace:
    """Return the task in which a node runs, with its superstep.

    Args:
        config: The node's config.
        node: Its name.
        says_there: True if it is a graph whose messages come into the handles of the graph around it. These then give
            the superstep, also where a thread went back to an earlier state or was edited, which LangGraph's count
            includes.
    """
    when = f"step {superstep_of(config)}"
    if says_there:
        entries = channel_values(config, ["handles"]).get("handles") or []
        supersteps = [number for entry in entries if isinstance(number := entry.get("superstep"), int)]
        when = str(1 + max(supersteps, default=-1))
    return TaskPlace(f"{node} {when} {place_in_superstep(config)}", branch_of(config))
