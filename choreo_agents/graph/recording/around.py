"""Functions as nodes of a graph: whoever listens is asked first, and told what they return."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import set_config_context

from choreo_agents.graph.langgraph_internals import AroundNode, BranchSpec
from choreo_agents.graph.message_names import is_named
from choreo_agents.graph.recording.listening import NodeExecution, execution_of, heard_by, listener_in
from choreo_agents.graph.recording.packing import named


def around(node: Any) -> AroundNode:
    """A node that is no agent, which is listened to; the same where nobody does."""

    def run(given: Any, config: RunnableConfig) -> Any:
        listener = listener_in(config)
        if listener is None:
            return node.invoke(given, config)
        execution: NodeExecution = execution_of(config, given)
        if (found := listener.before(execution)) is not None:
            return found.value
        inside = listener.inside(execution)
        try:
            # Also what calls a graph without handing on its config is to be inside.
            with set_config_context(heard := heard_by(config, inside)) as context:
                value = context.run(node.invoke, given, heard)
        except BaseException as error:
            listener.failed(execution, error, inside)
            raise
        return listener.after(execution, value, inside)

    async def arun(given: Any, config: RunnableConfig) -> Any:
        listener = listener_in(config)
        if listener is None:
            return await node.ainvoke(given, config)
        execution = execution_of(config, given)
        if (found := listener.before(execution)) is not None:
            return found.value
        inside = listener.inside(execution)
        try:
            with set_config_context(heard := heard_by(config, inside)) as context:
                value = await asyncio.create_task(node.ainvoke(given, heard), context=context)
        except BaseException as error:
            listener.failed(execution, error, inside)
            raise
        return listener.after(execution, value, inside)

    return AroundNode(node, run, arun)


def around_routes(branches: dict[str, dict[str, BranchSpec]]) -> None:
    """Let all routes of a graph name the messages that they send, in runs that name theirs."""
    for routes in branches.values():
        for name, route in routes.items():
            routes[name] = route._replace(path=_around_route(route.path))


def _around_route(path: Any) -> AroundNode:
    def run(state: Any, config: RunnableConfig) -> Any:
        found = path.invoke(state, config)
        return named(found, config) if is_named(config) else found

    async def arun(state: Any, config: RunnableConfig) -> Any:
        found = await path.ainvoke(state, config)
        return named(found, config) if is_named(config) else found

    return AroundNode(path, run, arun)
