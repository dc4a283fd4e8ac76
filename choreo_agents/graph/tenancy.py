"""One compiled graph for all tenants of a service: each run is served as its own, and threads stay whose they are."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.engine import Engine
from choreo_agents.errors import ForeignThreadError, InvalidRequestError
from choreo_agents.graph.langgraph_internals import (
    asaved_metadata,
    called_with,
    hidden_in,
    is_cached,
    is_nested,
    saved_metadata,
    saver_of,
    thread_of,
    with_hidden,
)
from choreo_agents.graph.view.imported_prompt import ImportedPrompt

Resolver = Callable[[RunnableConfig], str]
"""The salt of the tenant that a run is for: of what the service has authenticated, and never of a `configurable` value
that a client may write."""

_TENANT = "tenant"
_MARK = "choreo_tenant"
"""Under this name each checkpoint says whose its thread is."""


@dataclass(frozen=True)
class RunTenant:
    """The tenant that a run is for. A type of its own: no JSON that a client writes is one."""

    salt: str = field(repr=False)

    @property
    def mark(self) -> str:
        """Name the tenant in checkpoints, whatever engine serves it; does not tell the salt."""
        return hmac.new(self.salt.encode(), b"choreo thread", hashlib.sha256).hexdigest()[:16]

    def engine(self, engine: Engine) -> Engine:
        """Return an engine, for this tenant."""
        return engine.tenant(self.salt)

    def marked(
        self, config: RunnableConfig | None, thread: str | None, metadata: dict[str, Any] | None
    ) -> RunnableConfig:
        """Return a config whose checkpoints say whose they are, whatever a client has written there.

        Args:
            config: Of a call for the tenant.
            thread: That it names.
            metadata: Of the thread's last checkpoint; None: there is none.

        Raises:
            ForeignThreadError: The thread is another tenant's, or nobody's.
        """
        if thread is not None and metadata is not None and metadata.get(_MARK) != self.mark:
            raise _foreign(thread)
        hidden = with_hidden(config, _TENANT, self)
        return {**hidden, "metadata": {**(hidden.get("metadata") or {}), _MARK: self.mark}}


class Tenancy:
    """The tenants of one compiled graph's runs. May be used from any thread.

    Args:
        resolver: Names the tenant of a run.
    """

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._lock = threading.Lock()
        self._under_way: dict[str, list[RunTenant]] = {}

    def of(self, config: RunnableConfig) -> RunTenant:
        """Return who a run with this config is for: as the graph around says, if it runs in a node of one.

        Raises:
            InvalidRequestError: The resolver says nobody.
        """
        # Snapshots of states have their tenant in their config, and whoever has them may be another's.
        if is_nested(config) and (known := tenant_in(config)) is not None:
            return known
        salt = self._resolver(config)
        if not isinstance(salt, str) or not salt:
            raise InvalidRequestError(
                f"compile(tenant=...) must name the tenant of a run by its salt, a text that is not empty, not {salt!r}"
            )
        return RunTenant(salt)

    @contextmanager
    def claimed(self, tenant: RunTenant, thread: str | None) -> Iterator[None]:
        """Let nobody else begin a run in a thread that has no checkpoint yet."""
        if thread is None:
            yield
            return
        with self._lock:
            runs = self._under_way.setdefault(thread, [])
            if runs and runs[0] != tenant:
                raise _foreign(thread)
            runs.append(tenant)
        try:
            yield
        finally:
            with self._lock:
                runs.pop()
                if not runs:
                    del self._under_way[thread]


def tenant_in(config: RunnableConfig) -> RunTenant | None:
    """Return who the run that a config is of is for; None if nobody was named."""
    found = hidden_in(config, _TENANT)
    return found if isinstance(found, RunTenant) else None


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
                f"what agent {node!r} says is cached for all runs, whoever they are for: leave cache_policy out, or "
                "compile the graph for each tenant"
            )


def _foreign(thread: str) -> ForeignThreadError:
    return ForeignThreadError(
        f"thread {thread!r} is not this tenant's: a thread belongs to the tenant that began it, and one that was begun "
        "without compile(tenant=...) to none. Begin another"
    )


class TenantPrompts(WeakKeyDictionary[Any, ImportedPrompt]):
    """The prompts of schemas that one tenant has, by agent."""


class TenantThreads(CompiledStateGraph[Any, Any, Any, Any]):
    """A compiled graph whose threads are their tenants', if it was compiled for several."""

    @property
    def tenancy(self) -> Tenancy | None:
        """The tenants of its runs; None: all is one tenant's."""
        found: Tenancy | None = getattr(self.builder, "tenancy", None)
        return found

    def tenant_of(self, called: RunnableConfig) -> RunTenant | None:
        """Return who a run with this config is for; None: all is one tenant's."""
        return None if self.tenancy is None else self.tenancy.of(called)

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        with self._claimed(config) as is_outermost:
            yield from super().stream(input, self._own(config) if is_outermost else config, **options)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        with self._claimed(config) as is_outermost:
            own = await self._aown(config) if is_outermost else config
            chunks: Any = super().astream(input, own, **options)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    def get_state(self, config: RunnableConfig, **options: Any) -> Any:
        return super().get_state(self._own(config), **options)

    async def aget_state(self, config: RunnableConfig, **options: Any) -> Any:
        return await super().aget_state(await self._aown(config), **options)

    def get_state_history(self, config: RunnableConfig, **options: Any) -> Any:
        return super().get_state_history(self._own(config), **options)

    async def aget_state_history(self, config: RunnableConfig, **options: Any) -> Any:
        async for each in super().aget_state_history(await self._aown(config), **options):
            yield each

    def bulk_update_state(self, config: RunnableConfig, supersteps: Any) -> RunnableConfig:
        return super().bulk_update_state(self._own(config), supersteps)

    async def abulk_update_state(self, config: RunnableConfig, supersteps: Any) -> RunnableConfig:
        return await super().abulk_update_state(await self._aown(config), supersteps)

    @contextmanager
    def _claimed(self, config: RunnableConfig | None) -> Iterator[bool]:
        """A block in which nobody else can begin a run's thread; whether no graph around has seen to that.

        Raises:
            ForeignThreadError: Another tenant's run in it is under way.
        """
        called = called_with(self, config)
        if self.tenancy is None or (is_nested(called) and tenant_in(called) is not None):
            yield False
        else:
            with self.tenancy.claimed(self.tenancy.of(called), thread_of(called)):
                yield True

    def _own(self, config: RunnableConfig | None) -> Any:
        """Return the config for a thread that is the tenant's; raises what `RunTenant.marked` raises."""
        called = called_with(self, config)
        if (tenant := self.tenant_of(called)) is None:
            return config
        thread = thread_of(called)
        return tenant.marked(config, thread, saved_metadata(saver_of(self, called), thread))

    async def _aown(self, config: RunnableConfig | None) -> Any:
        """See `_own`."""
        called = called_with(self, config)
        if (tenant := self.tenant_of(called)) is None:
            return config
        thread = thread_of(called)
        return tenant.marked(config, thread, await asaved_metadata(saver_of(self, called), thread))
