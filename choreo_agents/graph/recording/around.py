"""Functions as nodes of a graph: whoever listens is asked first, and told what they return."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.graph.langgraph_internals import AroundNode
from choreo_agents.graph.recording.listening import NodeExecution, execution_of, heard_by, listener_in


def around(node: Any, name: str) -> AroundNode:
    """A node that is no agent, which is listened to; the same where nobody does."""

    def run(given: Any, config: RunnableConfig) -> Any:
        listener = listener_in(config)
        if listener is None:
            return node.invoke(given, config)
        execution: NodeExecution = execution_of(config, name, given)
        if (found := listener.before(execution)) is not None:
            return found.value
        inside = listener.inside(execution)
        try:
            value = node.invoke(given, heard_by(config, inside))
        except BaseException as error:
            listener.failed(execution, error, inside)
            raise
        return listener.after(execution, value, inside)

    async def arun(given: Any, config: RunnableConfig) -> Any:
        listener = listener_in(config)
        if listener is None:
            return await node.ainvoke(given, config)
        execution = execution_of(config, name, given)
        if (found := listener.before(execution)) is not None:
            return found.value
        inside = listener.inside(execution)
        try:
            value = await node.ainvoke(given, heard_by(config, inside))
        except BaseException as error:
            listener.failed(execution, error, inside)
            raise
        return listener.after(execution, value, inside)

    return AroundNode(node, run, arun)
