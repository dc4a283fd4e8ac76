"""Functions as nodes of a graph: whoever listens is told when they ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.graph.langgraph_internals import AroundNode, branch_of, superstep_of
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.recording.listening import RanNode, listening_in


def around(node: Any) -> AroundNode:
    """A node that is no agent, which is listened to; the same where nobody does."""

    @contextmanager
    def heard(config: RunnableConfig) -> Iterator[None]:
        listening, began_s, error = listening_in(config), time.perf_counter(), None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if listening is not None and listening.ran is not None:
                place = superstep_of(config), branch_of(config)
                listening.ran(RanNode(author_of(config), *place, began_s, error))

    def run(given: Any, config: RunnableConfig) -> Any:
        with heard(config):
            return node.invoke(given, config)

    async def arun(given: Any, config: RunnableConfig) -> Any:
        with heard(config):
            return await node.ainvoke(given, config)

    return AroundNode(node, run, arun)
