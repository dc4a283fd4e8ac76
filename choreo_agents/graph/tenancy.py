"""One compiled graph for all tenants of a service: each run is served as its own, and threads stay whose they are."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.engine import Engine
from choreo_agents.errors import ForeignThreadError, InvalidRequestError
from choreo_agents.graph.langgraph_internals import (
    asaved_metadata,
    hidden_in,
    is_cached,
    saved_metadata,
    saver_of,
    thread_of,
    with_hidden,
)
from choreo_agents.graph.view.imported_prompt import ImportedPrompt
from choreo_agents.graph.view.reader_rules import ReaderRules

Resolver = Callable[[RunnableConfig], str]
"""The salt of the tenant that a run is for: of what the service has authenticated, and never of a `configurable` value
that a client may write."""

_TENANT = "tenant"
_MARK = "choreo_tenant"
"""Under this name each checkpoint says whose its thread is."""


@dataclass(frozen=True)
class RunTenant:
    """Who a run is for."""

    salt: str

    @property
    def mark(self) -> str:
        """Names the tenant in checkpoints, whatever engine serves it; does not tell the salt."""
        return hmac.new(self.salt.encode(), b"choreo thread", hashlib.sha256).hexdigest()[:16]

    def engine(self, engine: Engine) -> Engine:
        """An engine, for this tenant."""
        return engine.tenant(self.salt)


class Served(Protocol):
    """What is asked of an agent."""

    name: str

    def reader_rules(self) -> ReaderRules: ...


class Tenancy:
    """Whose runs and threads are. May be used from any thread.

    Args:
        resolver: Names the tenant of a run.
    """

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[str, Counter[str]]] = {}

    def of(self, config: RunnableConfig) -> RunTenant:
        """Who a run with this config is for.

        Raises:
            InvalidRequestError: The resolver says nobody.
        """
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
            owner, runs = self._under_way.setdefault(thread, (tenant.mark, Counter()))
            if owner != tenant.mark:
                raise _foreign(thread)
            runs[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                runs[owner] -= 1
                if not runs[owner]:
                    self._under_way.pop(thread, None)


def tenant_in(config: RunnableConfig) -> RunTenant | None:
    """Who the run that a config is of is for; None if nobody was named."""
    found = hidden_in(config, _TENANT)
    return found if isinstance(found, RunTenant) else None


def require_owner(tenant: RunTenant, thread: str | None, metadata: dict[str, Any] | None) -> None:
    """Raise `ForeignThreadError` unless a thread's last checkpoint is the tenant's, or there is none."""
    if thread is not None and metadata is not None and metadata.get(_MARK) != tenant.mark:
        raise _foreign(thread)


def require_by_tenant(graph: StateGraph[Any, Any, Any, Any], nodes: Iterable[str], agents: Iterable[Served]) -> None:
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


class TenantPrompts:
    """What one tenant has made of agents' prompts of schemas. May be used from any thread."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Any, ImportedPrompt] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, agent: Any, make: Callable[[], ImportedPrompt]) -> ImportedPrompt:
        """An agent's; two that ask at once may make it twice."""
        with self._lock:
            found = self._made.get(agent)
        if found is None:
            found = make()
            with self._lock:
                self._made[agent] = found
        return found


class TenantThreads(CompiledStateGraph[Any, Any, Any, Any]):
    """A compiled graph whose threads are their tenants', if it was compiled for several."""

    @property
    def tenancy(self) -> Tenancy | None:
        """None: all is one tenant's."""
        found: Tenancy | None = getattr(self.builder, "tenancy", None)
        return found

    def tenant_of(self, called: RunnableConfig) -> RunTenant | None:
        """Who a run with this config is for; None: all is one tenant's."""
        if self.tenancy is None:
            return None
        return tenant_in(called) or self.tenancy.of(called)

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        if self._is_open(config):
            return super().stream(input, config, **options)
        return self._streamed(input, config, options)

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        if self._is_open(config):
            return super().astream(input, config, **options)
        return self._astreamed(input, config, options)

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
    def _owned(self, config: RunnableConfig) -> Iterator[RunnableConfig]:
        """The config for a thread that is the tenant's, for as long as nobody else can begin it.

        Raises:
            ForeignThreadError: It is another tenant's.
        """
        merged = self._merged(config)
        tenant, thread = self.tenant_of(merged), thread_of(merged)
        with nullcontext() if self.tenancy is None or tenant is None else self.tenancy.claimed(tenant, thread):
            yield merged

    def _is_open(self, config: RunnableConfig | None) -> bool:
        """Whether nobody has to be asked for: there is one tenant, or the graph around has asked."""
        return self.tenancy is None or tenant_in(self._merged(config)) is not None

    def _merged(self, config: RunnableConfig | None) -> RunnableConfig:
        return ensure_config(merge_configs(self.config, config))

    def _streamed(self, given: Any, config: RunnableConfig | None, options: dict[str, Any]) -> Iterator[Any]:
        assert self.tenancy is not None
        merged = self._merged(config)
        tenant, thread = self.tenancy.of(merged), thread_of(merged)
        with self.tenancy.claimed(tenant, thread):
            require_owner(tenant, thread, saved_metadata(saver_of(self, merged), thread))
            yield from super().stream(given, _marked(config, tenant), **options)

    async def _astreamed(
        self, given: Any, config: RunnableConfig | None, options: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        assert self.tenancy is not None
        merged = self._merged(config)
        tenant, thread = self.tenancy.of(merged), thread_of(merged)
        with self.tenancy.claimed(tenant, thread):
            require_owner(tenant, thread, await asaved_metadata(saver_of(self, merged), thread))
            chunks: Any = super().astream(given, _marked(config, tenant), **options)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    def _own(self, config: RunnableConfig) -> RunnableConfig:
        """A config for a thread's state, once it is known to be the tenant's."""
        if self.tenancy is None:
            return config
        merged = self._merged(config)
        tenant, thread = self.tenancy.of(merged), thread_of(merged)
        require_owner(tenant, thread, saved_metadata(saver_of(self, merged), thread))
        return _marked(config, tenant)

    async def _aown(self, config: RunnableConfig) -> RunnableConfig:
        if self.tenancy is None:
            return config
        merged = self._merged(config)
        tenant, thread = self.tenancy.of(merged), thread_of(merged)
        require_owner(tenant, thread, await asaved_metadata(saver_of(self, merged), thread))
        return _marked(config, tenant)


def _marked(config: RunnableConfig | None, tenant: RunTenant) -> RunnableConfig:
    """A config whose checkpoints say whose they are, whatever a client has written there."""
    hidden = with_hidden(config, _TENANT, tenant)
    return {**hidden, "metadata": {**(hidden.get("metadata") or {}), _MARK: tenant.mark}}
