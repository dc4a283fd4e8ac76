"""What runs: a compiled graph through whose door input comes, and that can be drawn and audited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol, cast

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.graph import Edge, Graph

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit import AuditReport, Chart, Declared, audit_entries
from choreo_agents.graph.compiling.charting import agents_of
from choreo_agents.graph.compiling.texts import TextsByModel
from choreo_agents.graph.langgraph_internals import called_with, saved_state_of
from choreo_agents.graph.provenance.door import Door
from choreo_agents.graph.provenance.notary import notary_of, with_notary
from choreo_agents.graph.quorum.board import with_board
from choreo_agents.graph.tenancy import TenantThreads
from choreo_agents.graph.visibility import Rule, rule_between


class _Built(Protocol):
    """The graph that it was compiled of, bound to its engine."""

    engine: Engine | None

    def audit(self) -> AuditReport: ...

    def chart(self) -> Chart: ...

    def visibility_table(self) -> dict[str, dict[str, Rule]]: ...


class CompiledChoreoGraph(TenantThreads):
    """A `CompiledStateGraph` whose drawing shows visibilities as edge labels."""

    @property
    def _built(self) -> _Built:
        return cast(_Built, self.builder)

    def get_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return self._labelled(super().get_graph(config, xray=xray))

    async def aget_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return self._labelled(await super().aget_graph(config, xray=xray))

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        door, run = self._opened(config)
        saved = door.asks(input)
        held = None if saved is None else self.get_state(saved)
        return super().stream(door.admitted(input, held), run, **options)

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        door, run = self._opened(config)
        saved = door.asks(input)
        if saved is None:
            return super().astream(door.admitted(input), run, **options)
        return self._astream_after(saved, door, input, run, options)

    async def _astream_after(
        self, saved: RunnableConfig, door: Door, given: Any, run: RunnableConfig, options: Mapping[str, Any]
    ) -> AsyncGenerator[Any]:
        parts: Any = super().astream(door.admitted(given, await self.aget_state(saved)), run, **options)
        async with aclosing(parts):
            async for part in parts:
                yield part

    def _opened(self, config: RunnableConfig | None) -> tuple[Door, RunnableConfig]:
        """The door through which input comes, and the config of the run behind it."""
        called, engine = called_with(self, config), self._built.engine
        if engine is not None and (tenant := self.tenant_of(called)) is not None:
            engine = tenant.engine(engine)
        run = with_board(with_notary(config, called, None if engine is None else engine.seals, self.name))
        return Door(notary_of(run) or notary_of(called), called, saved_state_of(self, called)), run

    def agents(self) -> Iterator[Agent]:
        """All agents, those of subgraphs included."""
        return agents_of(self.builder)

    def audit(self, state: Any = None, *, engine: Engine | None = None) -> AuditReport:
        """Who can be influenced by which private context, and how; or, given a state, who was.

        Args:
            state: What a run ended with, or its values at any time: the audit follows the lineage of its messages.
            engine: Which served the run, if agents have several.
        """
        if state is None:
            return self._built.audit()
        engines = {agent.engine for agent in self.agents() if agent.engine is not None}
        if engine is None and len(engines) != 1:
            raise InvalidRequestError(f"the agents of this graph have {len(engines)} engines: give audit(engine=...)")
        entries = state.get("handles") if isinstance(state, Mapping) else getattr(state, "handles", None)
        serving = engine if engine is not None else engines.pop()
        declared = Declared(self._built.chart(), TextsByModel(self.builder))
        return audit_entries(serving, declared, entries or [])

    def _labelled(self, graph: Graph) -> Graph:
        table = self._built.visibility_table()
        drawn = {(edge.source, edge.target) for edge in graph.edges}
        edges = [self._label(edge, table) for edge in graph.edges]
        for reader, rules in table.items():
            for source, rule in rules.items():
                says = rule.mode.shows or rule.mode.keeps_out
                if says and (source, reader) not in drawn and {source, reader} <= graph.nodes.keys():
                    edges.append(Edge(source, reader, data=rule.words(), conditional=True))
        graph.edges = edges
        return graph

    @staticmethod
    def _label(edge: Edge, table: Mapping[str, Mapping[str, Rule]]) -> Edge:
        rule = rule_between(table, edge.source, edge.target)
        return edge if rule is None or edge.data else edge._replace(data=rule.words())
