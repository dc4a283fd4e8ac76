"""A compiled graph: it serves each run for its tenant, so that threads stay whose they are, filters its input, and can
be drawn and audited."""

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
from choreo_agents.graph.audit.observed import audit_entries
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.compiling.charting import DeclaringGraph, agents_of
from choreo_agents.graph.drawing import Drawing, draw_audit, labelled
from choreo_agents.graph.durable.finding import lineage_store_for
from choreo_agents.graph.durable.thread_log import ThreadLog
from choreo_agents.graph.engines import EngineChoice, Engines, sealing_of
from choreo_agents.graph.keeping import forgetting, thread_in, under_way
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
from choreo_agents.graph.provenance import InputFilter, by_id, signer_for
from choreo_agents.graph.recording.recorded_run import recorded_run
from choreo_agents.graph.run_context import RunContext, RunTenant
from choreo_agents.graph.state import entries_in
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.reader_rules import charted_in

_MARK = "choreo_tenant"
"""Under this name each checkpoint says whose its thread is."""
_USES: dict[object, tuple[Any, str, RunTenant]] = {}
"""Of each call that uses a thread now, the first one first: what keeps the thread's state, the thread, and whose it is.
No lock guards it: a generator that is collected leaves it wherever that happens, and each change is one step."""
_OPTIONS = (*parameters_of(CompiledStateGraph.stream), "checkpoint_during")


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
        resolver = cast(DeclaringGraph, self.builder).resolver
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

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        with self._owned(config) as own:
            yield from super().stream(input, own, **options)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
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


class CompiledChoreoGraph(TenantThreads):
    """A `CompiledStateGraph` whose drawing shows visibilities as edge labels."""

    @property
    def _built(self) -> DeclaringGraph:
        return cast(DeclaringGraph, self.builder)

    def get_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return labelled(super().get_graph(config, xray=xray), self._built)

    async def aget_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return labelled(await super().aget_graph(config, xray=xray), self._built)

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        _require_options(self, input, options)
        filtering, run, engines = self._opened(config)
        saved, recorded = filtering.compares(input), recorded_run(self, called_with(self, run), engines, options)
        begun = super().stream

        def held() -> Generator[Any]:
            with under_way(run):
                given = filtering.admitted(input, None if saved is None else self.get_state(saved))
                parts = begun(given, run if recorded is None else recorded.heard(run), **options)
                if recorded is not None:
                    parts = recorded.stream(parts, given, partial(self.get_state, recorded.saved))
                yield from parts

        return held()

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        _require_options(self, input, options)
        filtering, run, engines = self._opened(config)
        saved, recorded = filtering.compares(input), recorded_run(self, called_with(self, run), engines, options)
        begun = super().astream

        async def held() -> AsyncGenerator[Any]:
            with under_way(run):
                given = filtering.admitted(input, None if saved is None else await self.aget_state(saved))
                parts: Any = begun(given, run if recorded is None else recorded.heard(run), **options)
                if recorded is not None:
                    parts = recorded.astream(parts, given, partial(self.aget_state, recorded.saved))
                async with aclosing(parts):
                    async for part in parts:
                        yield part

        return held()

    def bulk_update_state(self, config: RunnableConfig, supersteps: Any) -> Any:
        _, run, _ = self._opened(config)
        moved = _moved(run, supersteps, self.get_state(run))
        with self._owned(run) as own:
            return super().bulk_update_state(own, moved)

    async def abulk_update_state(self, config: RunnableConfig, supersteps: Any) -> Any:
        _, run, _ = self._opened(config)
        moved = _moved(run, supersteps, await self.aget_state(run))
        async with self._aowned(run) as own:
            return await super().abulk_update_state(own, moved)

    def _opened(self, config: RunnableConfig | None) -> tuple[InputFilter, RunnableConfig, Sequence[Engine]]:
        """Return the filter of a run's input, the config of the run, and who serves it for its tenant."""
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
            engines={**context.engines, **{each.model.adapter.fingerprint: each for each in engines}},
            tenant=tenant or context.tenant,
            signer=signer_for(called, seals, self.name),
            charted=charted_in(called, built.declared, built.policy.on_violation),
        )
        saved = saved_state_of(self, context.into(called))
        return InputFilter(context.signer, called, saved), context.into(config), engines

    def delete_thread(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """Drop all that there is of a thread: checkpoints, lineage, and its leases on every engine of the graph.

        What other threads hold, as forks do, stays with them, and so does what was leased otherwise. Nothing happens
        if there is no such thread.

        Args:
            thread_id: Which.
            config: From which the resolver tells the tenant, if it needs one.

        Raises:
            ThreadBusyError: The thread is under way: forget it when that has ended.
            ForeignThreadError: It is another tenant's.
            InvalidRequestError: The checkpointer does not say how a thread is deleted.
            StoreError: The store of its lineage has failed: forget it again when that works.
            OSError: A file of its KV cannot be removed.
        """
        with self._leaving(thread_id, config) as (called, saver, delete_log), self._owned(called):
            delete_thread(saver, thread_id)
            run_coroutine(delete_log())

    async def adelete_thread(self, thread_id: str, config: RunnableConfig | None = None) -> None:
        """See `forget`."""
        with self._leaving(thread_id, config) as (called, saver, delete_log):
            async with self._aowned(called):
                await adelete_thread(saver, thread_id)
                await delete_log()

    @contextmanager
    def _leaving(
        self, thread_id: str, config: RunnableConfig | None
    ) -> Iterator[tuple[RunnableConfig, Any, Callable[[], Coroutine[Any, Any, None]]]]:
        """The config for a thread that nobody can use meanwhile and that is then forgotten, what keeps its states, and
        what deletes its log."""
        _, called, engines = self._opened(called_with(self, at_thread(config, thread_id)))
        with forgetting(engines, str(thread_id)) as discard:

            async def delete_log() -> None:
                engine, store = sealing_of(engines), await lineage_store_for(self, called, self._built.lineage)
                if store is not None and engine is not None:
                    await ThreadLog(store, engine, str(thread_id)).delete(discard)

            yield called, saver_of(called, self), delete_log

    def agents(self) -> Iterator[Agent]:
        """All agents, those of subgraphs included."""
        return agents_of(self.builder)

    def audit(self, state: Any = None, *, engine: EngineChoice | None = None) -> AuditReport:
        """Who can be influenced by which private context, and how; or, given a state, who was.

        Args:
            state: What a run ended with, or its values at any time: the audit follows the lineage of its messages.
            engine: Which served the run, or several by name; by default those of the graph's agents.
        """
        if state is None:
            return cast(AuditReport, self._built.audited)
        engines = self._built.engines if engine is None else Engines(engine).given
        return audit_entries(engines, self._built.declared, entries_in(state))

    def draw(self) -> Drawing:
        """The graph as a Mermaid flowchart, which notebooks draw: nodes, edges with their visibilities, and over them
        each private context's way to whoever it can reach: thick for encodings, dotted for words, red where a promise
        is broken.
        """
        return Drawing(draw_audit(self._built, self.audit()))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The drawing, as notebooks draw it: no web service is asked for a picture."""
        return {"text/plain": repr(self), "text/markdown": self.draw()._repr_markdown_()}

    def __repr__(self) -> str:
        return f"CompiledChoreoGraph({', '.join(self.builder.nodes)})"


def require_compiled(app: Any) -> None:
    """Raise `InvalidRequestError` unless it is a compiled graph of ours."""
    if not isinstance(app, CompiledChoreoGraph):
        raise InvalidRequestError(
            f"{app!r:.80} is no compiled graph: give what ChoreoGraph.compile(engine=...) returns"
        )


def _require_options(graph: CompiledChoreoGraph, given: Any, options: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` if a run is given what LangGraph passes over in silence, or no state."""
    require_known("a run of a graph", options, {*_OPTIONS} - {"self"})
    if isinstance(given, str | BaseMessage) or (isinstance(given, list) and given):
        raise InvalidRequestError(f'a run takes a state, {{"messages": ...}}, not {str(given)[:80]!r}')
    if isinstance(given, Mapping) and given and given.keys().isdisjoint(graph.builder.channels):
        require_known("the state of the graph", given, graph.builder.channels)


def _moved(run: RunnableConfig, supersteps: Any, standing: StateSnapshot) -> Any:
    """Return an operator's updates: what they bring from another thread goes on in this one, where this stands."""
    if (signer := RunContext.of(run).signer) is None:
        return supersteps
    move = partial(signer.moved, standing=by_id(standing.values.get("messages")))
    return [[each._replace(values=move(each.values)) for each in updates] for updates in supersteps]
