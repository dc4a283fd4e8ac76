"""One compiled graph for all tenants of a service: each run is served as its own, and threads stay whose they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.errors import ForeignThreadError, InvalidRequestError
from choreo_agents.graph.langgraph_internals import (
    asaved_metadata,
    called_with,
    is_cached,
    is_nested,
    saved_metadata,
    saver_of,
    thread_of,
)
from choreo_agents.graph.run_context import RunContext, RunTenant

Resolver = Callable[[RunnableConfig], str]
"""The salt of the tenant that a run is for: of what the service has authenticated, and never of a `configurable` value
that a client may write."""

_MARK = "choreo_tenant"
"""Under this name each checkpoint says whose its thread is."""


_USES: dict[object, tuple[Any, str, RunTenant]] = {}
"""Of each call that uses a thread now, the first one first: what keeps the thread's state, the thread, and whose it is.
No lock guards it: a generator that is collected leaves it wherever that happens, and each change is one step."""


def require_by_tenant(graph: StateGraph[Any, Any, Any, Any], nodes: Iterable[str], agents: Iterable[Any]) -> None:
    """Raise `InvalidRequestError` unless a graph serves each run for its tenant, wherever an agent speaks.

    Args:
        graph: That is compiled.
        nodes: Its agents' own.
        agents: All of them, those of subgraphs included.
    """
    for agent in agents:
        if not agent.reader_rules().by_tenant:
            raise InvalidRequestError(
                f"agent {agent.name!r} stands in a subgraph that serves one tenant: compile that with tenant=..., too"
            )
    for node in nodes:
        if is_cached(graph, node):
            raise InvalidRequestError(
                f"what agent {node!r} says is cached for all runs: leave cache_policy out, or compile for each tenant"
            )


class TenantThreads(CompiledStateGraph[Any, Any, Any, Any]):
    """A compiled graph whose threads are their tenants', if it was compiled for several.

    A run or a state method whose config says in its `RunContext` who it is for does not ask for that again.
    """

    def tenant_of(self, called: RunnableConfig) -> RunTenant | None:
        """Return who a call with this config is for; None: all is one tenant's.

        In a node of a graph it is for whom that is, and in the same thread.

        Raises:
            InvalidRequestError: The resolver says nobody; or a node's config was given another thread.
        """
        resolver: Resolver | None = getattr(self.builder, "resolver", None)
        if resolver is None:
            return None
        thread, known = thread_of(called), RunContext.of(called).tenant
        if known is None:
            salt = resolver(called)
            if not isinstance(salt, str) or not salt:
                raise InvalidRequestError(
                    f"compile(tenant=...) must name the tenant of a run by its salt, not {salt!r}"
                )
            return RunTenant(salt, thread)
        if thread != known.thread:
            raise InvalidRequestError(
                f"{thread!r} is not the thread of the run around: call with a config of its own, not with a node's"
            )
        return known

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        with self._owned(config) as own:
            yield from super().stream(input, own, **options)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        async with self._aowned(config) as own:
            chunks: Any = super().astream(input, own, **options)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    def get_state(self, config: RunnableConfig, **options: Any) -> Any:
        with self._owned(config):
            return super().get_state(config, **options)

    async def aget_state(self, config: RunnableConfig, **options: Any) -> Any:
        async with self._aowned(config):
            return await super().aget_state(config, **options)

    def get_state_history(self, config: RunnableConfig, **options: Any) -> Any:
        with self._owned(config):
            yield from super().get_state_history(config, **options)

    async def aget_state_history(self, config: RunnableConfig, **options: Any) -> Any:
        async with self._aowned(config):
            async for each in super().aget_state_history(config, **options):
                yield each

    @contextmanager
    def _owned(self, config: RunnableConfig | None) -> Iterator[Any]:
        """Have nobody else begin a thread in a block; yields the config for what is the tenant's there.

        Raises:
            ForeignThreadError: The thread is another tenant's, or nobody's.
            InvalidRequestError: No thread is named; and what `tenant_of` raises.
        """
        with self._used(config) as (saver, thread, owned):
            yield owned(saved_metadata(saver, thread))

    @asynccontextmanager
    async def _aowned(self, config: RunnableConfig | None) -> AsyncGenerator[Any]:
        """See `_owned`."""
        with self._used(config) as (saver, thread, owned):
            yield owned(await asaved_metadata(saver, thread))

    @contextmanager
    def _used(self, config: RunnableConfig | None) -> Iterator[Any]:
        """Yield what keeps a thread's state, the thread, and the config, by what its last checkpoint says of itself."""
        called = called_with(self, config)
        tenant, around = self.tenant_of(called), RunContext.of(called).tenant
        saver, thread = saver_of(called, self), thread_of(called)
        if saver is not None and thread is None and not is_nested(called):
            raise InvalidRequestError(
                "the graph has a checkpointer, and the config has no thread_id: "
                'give {"configurable": {"thread_id": "..."}}, or compile without a checkpointer'
            )
        # The graph around has seen to what it keeps itself; and without a thread a node's own keeps nothing.
        is_seen_to = around is not None and (around.saver is saver or thread is None)
        if tenant is None or saver is None or is_seen_to:
            yield None, None, lambda _: config if tenant is None else _marked(config, called, tenant)
            return
        if thread is None or not called["configurable"]["thread_id"]:  # LangGraph calls 0 otherwise at every turn
            raise InvalidRequestError('name the thread: {"configurable": {"thread_id": "..."}}')
        use = object()
        _USES[use] = saver, thread, tenant
        # Until there is a checkpoint, whoever came first has begun it. Who came later may still own it, and has
        # a checkpoint then: one who is about to be refused keeps nobody from his own.
        first = next(whose for kept, name, whose in list(_USES.values()) if kept is saver and name == thread)

        def owned(metadata: dict[str, Any] | None) -> RunnableConfig:
            if (first.mark if metadata is None else metadata.get(_MARK)) != tenant.mark:
                raise ForeignThreadError(
                    f"thread {thread!r} is not this tenant's: a thread belongs to the tenant that began it, and one "
                    "that was begun without compile(tenant=...) to none. Begin another"
                )
            return _marked(config, called, replace(tenant, saver=saver))

        try:
            yield saver, thread, owned
        finally:
            del _USES[use]


def _marked(config: RunnableConfig | None, called: RunnableConfig, tenant: RunTenant) -> RunnableConfig:
    """Return a config whose checkpoints say whose they are, whatever a client has written there."""
    run = replace(RunContext.of(called), tenant=tenant).into(config)
    return {**run, "metadata": {**(run.get("metadata") or {}), _MARK: tenant.mark}}
