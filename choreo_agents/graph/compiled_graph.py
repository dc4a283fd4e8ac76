"""A compiled graph: filters its input, serves each run for its tenant, keeps threads apart by tenant, and can be
audited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.graph import Graph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import StateSnapshot

from choreo_agents.arguments import parameters_of, require_known
from choreo_agents.engine import Engine
from choreo_agents.errors import ForeignThreadError, InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.influence import audit_entries
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.compiling import DeclaringGraph, agents_of
from choreo_agents.graph.drawing import Drawing, draw_audit, label_edges
from choreo_agents.graph.durable.finding import lineage_store_for
from choreo_agents.graph.durable.thread_log import ThreadLog
from choreo_agents.graph.engines import EngineChoice, Engines, choose_signer
from choreo_agents.graph.keeping import deleting_thread, thread_in, thread_in_use
from choreo_agents.graph.langgraph_internals import (
    adelete_thread,
    asaved_metadata,
    at_thread,
    called_with,
    delete_thread,
    is_nested,
    require_outermost,
    saved_metadata,
    saved_state_of,
    saver_of,
    thread_of,
)
from choreo_agents.graph.nesting import in_graph
from choreo_agents.graph.recording.recorded_run import recorded_run
from choreo_agents.graph.run_context import RunContext, RunTenant
from choreo_agents.graph.signer import InputFilter, by_id, signer_for
from choreo_agents.graph.state import channel_in
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.reader_rules import charted_in

_MARK = "choreo_tenant"
"""Metadata key under which each checkpoint names the tenant of its thread."""
_USES: dict[object, tuple[Any, str, RunTenant]] = {}
"""The calls that use a thread now, oldest first: the checkpointer, the thread and its tenant.

No lock guards it: a generator that is garbage collected removes its call in any thread, and each change is one atomic
operation on a dict.
"""
_OPTIONS = (*parameters_of(CompiledStateGraph.stream), "checkpoint_during")


class CompiledChoreoGraph(CompiledStateGraph[Any, Any, Any, Any]):
    """A `CompiledStateGraph` of agents, which filters input, records runs, and draws visibilities as edge labels.

    If it was compiled for several tenants, its threads belong to them. Runs and state methods whose config has the
    tenant in its `RunContext` do not ask the resolver again.
    """

    @property
    def _built(self) -> DeclaringGraph:
        return cast(DeclaringGraph, self.builder)

    def get_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return label_edges(super().get_graph(config, xray=xray), self._built)

    async def aget_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return label_edges(await super().aget_graph(config, xray=xray), self._built)

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        _require_options(self, input, options)
        filtering, run, engines = self._prepare(config)
        saved, recorded = filtering.snapshot_config(input), recorded_run(self, called_with(self, run), engines, options)
        start = super().stream

        def generate() -> Generator[Any]:
            listened = run if recorded is None else recorded.with_listener(run)
            with self._owned(listened) as own, thread_in_use(run):
                admitted = filtering.filter(input, None if saved is None else self.get_state(saved))
                parts = start(admitted, own, **options)
                if recorded is not None:
                    parts = recorded.stream(parts, admitted, partial(self.get_state, recorded.saved))
                yield from parts

        return generate()

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        _require_options(self, input, options)
        filtering, run, engines = self._prepare(config)
        saved, recorded = filtering.snapshot_config(input), recorded_run(self, called_with(self, run), engines, options)
        start = super().astream

        async def generate() -> AsyncGenerator[Any]:
            listened = run if recorded is None else recorded.with_listener(run)
            async with self._aowned(listened) as own:
                with thread_in_use(run):
                    admitted = filtering.filter(input, None if saved is None else await self.aget_state(saved))
                    parts: Any = start(admitted, own, **options)
                    if recorded is not None:
                        parts = recorded.astream(parts, admitted, partial(self.aget_state, recorded.saved))
                    async with aclosing(parts):
                        async for part in parts:
                            yield part

        return generate()

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
            async for snapshot in super().aget_state_history(config, **options):
                yield snapshot

    def bulk_update_state(self, config: RunnableConfig, supersteps: Any) -> Any:
        _, run, _ = self._prepare(config)
        moved = _move_updates(run, supersteps, self.get_state(run))
        with self._owned(run) as own:
            return super().bulk_update_state(own, moved)

    async def abulk_update_state(self, config: RunnableConfig, supersteps: Any) -> Any:
        _, run, _ = self._prepare(config)
        moved = _move_updates(run, supersteps, await self.aget_state(run))
        async with self._aowned(run) as own:
            return await super().abulk_update_state(own, moved)

    def _prepare(self, config: RunnableConfig | None) -> tuple[InputFilter, RunnableConfig, Sequence[Engine]]:
        """Return a run's input filter, its config, and the engines that serve it for its tenant."""
        called, built = called_with(self, config), self._built
        require_outermost(called)
        context, tenant = in_graph(called), self.tenant_of(called)

        def serving(engine: Engine) -> Engine:
            twin = context.twin(engine)
            return twin if tenant is None else twin.tenant(tenant.salt)

        engines = [*map(serving, built.engines)]
        seals = None if built.engine is None else serving(built.engine).lineage.seals
        context = replace(
            context,
            thread=thread_in(called, self),
            lineage=built.lineage if context.thread is None else context.lineage,
            engines={**context.engines, **{engine.model.adapter.fingerprint: engine for engine in engines}},
            tenant=tenant or context.tenant,
            signer=signer_for(called, seals, self.name),
            charted=charted_in(called, built.declared, built.policy.on_violation),
        )
        saved = saved_state_of(self, context.into(called))
        return InputFilter(context.signer, called, saved), context.into(config), engines

    def tenant_of(self, called: RunnableConfig) -> RunTenant | None:
        """Return the tenant of a call with this config; None: there is only one tenant.

        A call from a node has the tenant and the thread of the node's run.

        Raises:
            InvalidRequestError: The resolver names no tenant; or a node's config was given another thread.
        """
        resolver = self._built.resolver
        if resolver is None:
            return None
        thread, tenant = thread_of(called), RunContext.of(called).tenant
        if tenant is None:
            salt = resolver(called)
            if not isinstance(salt, str) or not salt:
                raise InvalidRequestError(f"compile(tenant=...) must return the salt of a run's tenant, not {salt!r}")
            return RunTenant(salt, thread)
        if thread != tenant.thread:
            raise InvalidRequestError(
                f"{thread!r} is not the thread of the enclosing run: call with a config of your own, not with a node's"
            )
        return tenant

    @contextmanager
    def _owned(self, config: RunnableConfig | None) -> Iterator[Any]:
        """Check that the thread is the tenant's, and hold it for the block. Yield the config for the tenant's calls.

        Raises:
            ForeignThreadError: The thread is another tenant's, or has none.
            InvalidRequestError: No thread is named; also all that `tenant_of` raises.
        """
        with self._in_use(config) as (saver, thread, owned):
            yield owned(saved_metadata(saver, thread))

    @asynccontextmanager
    async def _aowned(self, config: RunnableConfig | None) -> AsyncGenerator[Any]:
        """Do the same as `_owned` with an async checkpointer."""
        with self._in_use(config) as (saver, thread, owned):
            yield owned(await asaved_metadata(saver, thread))

    @contextmanager
    def _in_use(self, config: RunnableConfig | None) -> Iterator[Any]:
        """Yield a checkpointer, a thread, and a function that checks the thread's metadata and returns the config."""
        called = called_with(self, config)
        tenant, around = self.tenant_of(called), RunContext.of(called).tenant
        saver, thread = saver_of(called, self), thread_of(called)
        if saver is not None and thread is None and not is_nested(called):
            raise InvalidRequestError(
                "the graph has a checkpointer, and the config has no thread_id: "
                'give {"configurable": {"thread_id": "..."}}, or compile without a checkpointer'
            )
        # The graph around has checked the thread if both share a checkpointer; without a thread nothing is kept.
        is_seen_to = around is not None and (around.saver is saver or thread is None)
        if tenant is None or saver is None or is_seen_to:
            yield None, None, lambda _: config if tenant is None else _marked(config, called, tenant)
            return
        if thread is None or not called["configurable"]["thread_id"]:  # LangGraph calls 0 otherwise at every turn
            raise InvalidRequestError('the config has no thread_id: pass {"configurable": {"thread_id": "..."}}')
        use = object()
        _USES[use] = saver, thread, tenant
        # Until there is a checkpoint, the thread belongs to the oldest call. Once there is one, only its mark counts:
        # a call that is about to be refused must not lock out the owner.
        first = next(owner for used, name, owner in list(_USES.values()) if used is saver and name == thread)

        def owned(metadata: dict[str, Any] | None) -> RunnableConfig:
            if (first.mark if metadata is None else metadata.get(_MARK)) != tenant.mark:
                raise ForeignThreadError(
                    f"thread {thread!r} does not belong to this tenant: a thread belongs to the tenant that began it. "
                    "Use another thread_id"
                )
            return _marked(config, called, replace(tenant, saver=saver))

        try:
            yield saver, thread, owned
        finally:
            del _USES[use]

    def delete_thread(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """Delete a thread: checkpoints, lineage, and its leases on every engine of the graph.

        Leases of other threads, such as forks, and other leases stay. Nothing happens if there is no such thread.

        Args:
            thread_id: The thread.
            config: The config from which the resolver tells the tenant, if it needs one.

        Raises:
            ThreadBusyError: A run of the thread is in progress: delete it when that has ended.
            ForeignThreadError: It is another tenant's.
            InvalidRequestError: The checkpointer cannot delete threads.
            StoreError: The store of its lineage has failed: delete it again when that works.
            OSError: A file of its KV cannot be removed.
        """
        with self._deleting(thread_id, config) as (called, saver, delete_log), self._owned(called):
            delete_thread(saver, thread_id)
            run_coroutine(delete_log())

    async def adelete_thread(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """Delete a thread: see `delete_thread`."""
        with self._deleting(thread_id, config) as (called, saver, delete_log):
            async with self._aowned(called):
                await adelete_thread(saver, thread_id)
                await delete_log()

    @contextmanager
    def _deleting(
        self, thread_id: str, config: RunnableConfig | None
    ) -> Iterator[tuple[RunnableConfig, Any, Callable[[], Coroutine[Any, Any, None]]]]:
        """Block a thread for deletion. Yield its config, its checkpointer, and a function that deletes its log."""
        _, called, engines = self._prepare(called_with(self, at_thread(config, thread_id)))
        with deleting_thread(engines, str(thread_id)) as discard:

            async def delete_log() -> None:
                engine, store = choose_signer(engines), await lineage_store_for(self, called, self._built.lineage)
                if store is not None and engine is not None:
                    await ThreadLog(store, engine, str(thread_id)).delete(discard)

            yield called, saver_of(called, self), delete_log

    def agents(self) -> Iterator[Agent]:
        """Yield all agents, those of subgraphs included."""
        return agents_of(self.builder)

    def audit(self, state: Any = None, *, engine: EngineChoice | None = None) -> AuditReport:
        """Report which private contexts can influence which agents; or, given a state, which did.

        Args:
            state: The final state of a run, or its values at any time: the audit follows the lineage of its messages.
            engine: The engine that served the run, or several by name; by default those of the graph's agents.
        """
        if state is None:
            return cast(AuditReport, self._built.audited)
        engines = self._built.engines if engine is None else Engines(engine).engines
        return audit_entries(engines, self._built.declared, channel_in(state, "handles") or [])

    def draw(self) -> Drawing:
        """Return the graph as a Mermaid flowchart, which notebooks draw.

        It shows nodes, edges with their visibilities, and each private context's paths to all readers that it can
        reach: thick for encodings, dotted for text, red where a promise is broken.
        """
        return Drawing(draw_audit(self._built, self.audit()))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the drawing for notebooks, without a request to a web service."""
        return {"text/plain": repr(self), "text/markdown": self.draw()._repr_markdown_()}

    def __repr__(self) -> str:
        return f"CompiledChoreoGraph({', '.join(self.builder.nodes)})"


def _marked(config: RunnableConfig | None, called: RunnableConfig, tenant: RunTenant) -> RunnableConfig:
    """Return a config whose checkpoints name the tenant, whatever a client has written there."""
    run = replace(RunContext.of(called), tenant=tenant).into(config)
    return {**run, "metadata": {**(run.get("metadata") or {}), _MARK: tenant.mark}}


def require_compiled(app: Any) -> None:
    """Raise `InvalidRequestError` unless it is a `CompiledChoreoGraph`."""
    if not isinstance(app, CompiledChoreoGraph):
        raise InvalidRequestError(
            f"{app!r:.80} is not a compiled graph: pass what ChoreoGraph.compile(engine=...) returns"
        )


def _require_options(graph: CompiledChoreoGraph, state: Any, options: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` if a run is given no state, or keys and options that LangGraph would silently
    ignore."""
    require_known("a run of a graph", options, {*_OPTIONS} - {"self"})
    if isinstance(state, str | BaseMessage) or (isinstance(state, list) and state):
        raise InvalidRequestError(f'a run takes a state, such as {{"messages": ...}}, not {str(state)[:80]!r}')
    if isinstance(state, Mapping) and state and state.keys().isdisjoint(graph.builder.channels):
        require_known("the state of the graph", state, graph.builder.channels)


def _move_updates(run: RunnableConfig, supersteps: Any, standing: StateSnapshot) -> Any:
    """Return an operator's state updates, with messages from another thread moved into this one."""
    if (signer := RunContext.of(run).signer) is None:
        return supersteps
    move = partial(signer.moved, standing=by_id(standing.values.get("messages")))
    return [[update._replace(values=move(update.values)) for update in updates] for updates in supersteps]
