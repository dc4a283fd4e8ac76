"""Functions as nodes of a graph: whoever listens is told when they ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.graph.langgraph_internals import AroundNode
from choreo_agents.graph.listening import PlayedNode
from choreo_agents.graph.run_context import RunContext


def around(node: Any) -> AroundNode:
    """A node that is no agent, which is listened to; the same where nobody does."""

    @contextmanager
    def heard(given: Any, config: RunnableConfig) -> Iterator[PlayedNode]:
        listening, began_s, error = RunContext.of(config).listening, time.perf_counter(), None
        try:
            yield PlayedNode() if listening.play is None else listening.play(given, config)
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
