"""Which store keeps the lineage of a run.

the graph's own    `compile(lineage=store)`; `compile(lineage=False)`: none
the run's          `compile(store=...)`, or what a platform brings
beside             a file beside that of a SQLite checkpointer
none               nothing keeps the run's states in a file, or its engine has no salt
"""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.durable.beside import store_beside
from choreo_agents.graph.langgraph_internals import saver_of, store_of
from choreo_agents.graph.run_context import LineageChoice, RunContext


def require_choice(choice: Any, engine: Engine | None, *, by_tenant: bool) -> None:
    """Raise `InvalidRequestError` unless lineage can be kept so."""
    if choice is None or choice is False:
        return
    if not isinstance(choice, BaseStore):
        raise InvalidRequestError(f"lineage must be a LangGraph store, False or None, not {choice!r}")
    if engine is not None and not by_tenant and not engine.lineage.seals.salted:
        raise InvalidRequestError(
            "what is kept of a run is sealed with a key made of the engine's salt, and this one has none: load it with "
            "salt=..., a secret of yours, the same in every process that is to go on with the run"
        )


async def lineage_store_of(config: RunnableConfig) -> BaseStore | None:
    """The store that keeps the lineage of the run that a node stands in; None: nothing does.

    Raises:
        StoreError: It cannot be opened.
    """
    return await _found(RunContext.of(config).lineage, store_of(config), saver_of(config))


async def lineage_store_for(graph: Any, called: RunnableConfig, choice: LineageChoice) -> BaseStore | None:
    """The store that keeps the lineage of a compiled graph's runs, outside of any; raises the same.

    Args:
        graph: Compiled.
        called: The config that it is called with.
        choice: The graph's own.
    """
    around = RunContext.of(called)
    return await _found(choice if around.thread is None else around.lineage, graph.store, saver_of(called, graph))


async def _found(choice: Any, usual: BaseStore | None, saver: Any) -> BaseStore | None:
    if choice is False or saver is None:
        return None
    return choice if isinstance(choice, BaseStore) else usual or await store_beside(saver)
