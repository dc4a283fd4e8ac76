"""Where a node stands: behind which nodes of the graphs around it, and in which of their tasks; and who hears of it.

Each node of our graphs knows its name since it was compiled, and tells what runs in it. LangGraph's names of tasks are
asked for nodes of its own graphs alone, which tell nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
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
from choreo_agents.graph.run_context import ReplayedNode, RunContext, TaskPlace
from choreo_agents.graph.state import entries_in, merge_entries
from choreo_agents.graph.visibility import REENCODED


def path_of(config: RunnableConfig) -> tuple[str, ...]:
    """Return the node that runs with this config, behind those around its graph; empty outside LangGraph."""
    known = RunContext.of(config)
    return (*known.nodes, *nodes_behind(config, known.depth))


def author_of(config: RunnableConfig, node: str | None = None) -> str:
    """Return the author of what a node with this config says: `team|judge`.

    Args:
        config: The node's.
        node: Its name, if it is one of a graph of ours, and knows that.
    """
    return "|".join(path_of(config) if node is None else (*RunContext.of(config).nodes, node))


def tasks_around(config: RunnableConfig) -> tuple[TaskPlace, ...]:
    """Return the tasks that a node's graph stands in, outermost first."""
    known = RunContext.of(config)
    return (*known.tasks, *map(TaskPlace, task_parts_of(config)[known.depth :]))[:-1]


def in_graph(called: RunnableConfig) -> RunContext:
    """Return the context of a graph's run, called with this config, whose nodes know where they stand."""
    known, parts = RunContext.of(called), task_parts_of(called)
    if not is_nested(called):
        return replace(known, nodes=(), depth=0, tasks=(), given=())
    # A node of ours has told which task it is; one of LangGraph's own has not.
    is_told = len(parts) == known.depth
    tasks = known.tasks if is_told else (*tasks_around(called), _place(called, path_of(called)[-1]))
    return replace(known, nodes=path_of(called), depth=len(parts), tasks=tasks)


def placed_node(node: Any, name: str, sign: Callable[[Any, RunnableConfig], Any], *, holds_agents: bool) -> AroundNode:
    """Make a node of a graph of ours, which is no agent, tell all that it calls where that stands.

    Args:
        node: What it is, and its `name`.
        sign: Signs what it writes.
        holds_agents: Whether it is a graph, or holds one, whose agents see what the node is given.
    """
    graph = node if isinstance(node, CompiledStateGraph) and "handles" in node.channels else None
    # What is said in there comes out as it was encoded, whichever channels its schema puts out.
    puts_out: Any = () if graph is None else graph.output_channels
    out: Any = {}
    if not isinstance(puts_out, str) and "messages" in puts_out:
        out = {"output_keys": [*dict.fromkeys([*puts_out, "handles"])]}

    @contextmanager
    def placed(given: Any, config: RunnableConfig) -> Iterator[tuple[RunnableConfig, Context]]:
        entries = entries_in(given) if holds_agents else []
        if any(entry.get("select") == REENCODED.name for entry in entries):
            raise VisibilityError(
                f"a send hands messages to {name!r} {REENCODED.name!r}, and that is a graph, whose agents see what is "
                f"declared to it: declare them to {name!r} {REENCODED.name!r}, and send them shared"
            )
        place = _place(config, name, says_there=graph is not None)
        known, depth = RunContext.of(config), len(task_parts_of(config))
        around = merge_entries([*known.given], entries) if holds_agents else ()
        tasks = (*tasks_around(config), place)
        within = replace(known, nodes=(*known.nodes, name), depth=depth, tasks=tasks, given=around).into(config)
        try:
            # Also what calls a graph without handing on its config stands there.
            with set_config_context(within) as context:
                yield within, context
        except ParentCommand as sent:
            # What a graph in it writes to this one directly it does not return.
            sent.args = (sign(sent.args[0], config),)
            raise

    def run(given: Any, config: RunnableConfig) -> Any:
        with placed(given, config) as (within, context):
            return context.run(node.invoke, given, within, **out)

    async def arun(given: Any, config: RunnableConfig) -> Any:
        with placed(given, config) as (within, context):
            return await asyncio.create_task(node.ainvoke(given, within, **out), context=context)

    return AroundNode(node, run, arun)


def around(node: Any) -> AroundNode:
    """A node that is no agent, which is listened to; the same where nobody does."""

    @contextmanager
    def heard(given: Any, config: RunnableConfig) -> Iterator[ReplayedNode]:
        listening, began_s, error = RunContext.of(config).listening, time.perf_counter(), None
        try:
            yield ReplayedNode() if listening.play is None else listening.play(given, config)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if listening.ran is not None:
                listening.ran(config, began_s, error)

    def run(given: Any, config: RunnableConfig) -> Any:
        with heard(given, config) as played:
            result = played.value if played.is_known else node.invoke(given, config)
            played.keep(result)
            return result

    async def arun(given: Any, config: RunnableConfig) -> Any:
        with heard(given, config) as played:
            result = played.value if played.is_known else await node.ainvoke(given, config)
            played.keep(result)
            return result

    return AroundNode(node, run, arun)


def _place(config: RunnableConfig, node: str, *, says_there: bool = False) -> TaskPlace:
    """Return which task of its superstep a node runs in, and in which superstep that is.

    Args:
        config: The node's, and `node` its name.
        says_there: Whether it is a graph, and what is said in that comes into the handles of the graph around it. They
            tell the superstep also where somebody has gone back to an earlier state or edited it: LangGraph counts
            that, too.
    """
    when = f"step {superstep_of(config)}"
    if says_there:
        entries = channel_values(config, ["handles"]).get("handles") or []
        supersteps = [found for entry in entries if isinstance(found := entry.get("superstep"), int)]
        when = str(1 + max(supersteps, default=-1))
    return TaskPlace(f"{node} {when} {place_in_superstep(config)}", branch_of(config))
