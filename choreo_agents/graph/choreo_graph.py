"""A `StateGraph` whose edges say what each node may see."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.graph import Edge, Graph
from langgraph.graph import END, START, StateGraph

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit import AuditReport, Chart, Declared, Hop, Policy, audit_chart, audit_entries, harmless
from choreo_agents.graph.compiling.binding import bound_agent, named_contexts, require_personas, with_system
from choreo_agents.graph.compiling.charting import agents_of, chart_of, found
from choreo_agents.graph.compiling.loops import require_bounded_loops
from choreo_agents.graph.compiling.promises import kept
from choreo_agents.graph.compiling.texts import TextsByModel
from choreo_agents.graph.langgraph_internals import called_with, relabelled, saved_state_of
from choreo_agents.graph.provenance.door import Door
from choreo_agents.graph.provenance.notary import notary_of, with_notary
from choreo_agents.graph.provenance.signing import sign
from choreo_agents.graph.quorum.board import with_board
from choreo_agents.graph.quorum.rewiring import rewire
from choreo_agents.graph.state import ChoreoState
from choreo_agents.graph.synthesizer import Synthesizer
from choreo_agents.graph.tenancy import Resolver, Tenancy, TenantThreads, require_by_tenant
from choreo_agents.graph.visibility import SHARED, History, Mode, Positions, Rule, Scope, VisibilityTable, rule_of

Self = TypeVar("Self", bound="ChoreoGraph")


class ChoreoGraph(StateGraph[Any, Any, Any, Any]):
    """A LangGraph `StateGraph` for agents that hand each other KV-cache handles.

    Args:
        state_schema: `ChoreoState`, or a TypedDict that extends it.
        system: The public root: a system prompt that every view starts with, encoded once.
        policy: What it promises about its private contexts beyond what it declares `private`.
        positions: Where the messages of a view stand, unless an agent says otherwise (see `Agent`).
        **options: As for `StateGraph`.
    """

    def __init__(
        self,
        state_schema: type[Any] = ChoreoState,
        *,
        system: str | None = None,
        policy: Policy | None = None,
        positions: Positions = "sequential",
        **options: Any,
    ) -> None:
        super().__init__(state_schema, **options)
        if positions not in get_args(Positions):
            raise VisibilityError(f"positions must be 'sequential' or 'parallel', not {positions!r}")
        self.system = system
        self.policy = policy or Policy()
        self.positions = positions
        self.personas: dict[str, str] = {}
        """Of functions that are declared to be somebody's nodes."""
        self._visibility = VisibilityTable()
        self._changed: tuple[Hop, ...] = ()
        self.engine: Engine | None = None
        """Of a compiled graph's builder, the engine that seals what is said in it; None: it has no agents."""
        self._charted: Chart | None = None
        """Of a compiled graph's builder, the chart as it runs."""
        self.origin: ChoreoGraph = self
        """Of a compiled graph's builder, the graph that it was compiled from."""
        self.tenancy: Tenancy | None = None
        """Of a compiled graph's builder, whose its runs are; None: all are one tenant's."""

    def add_node(self: Self, node: Any, action: Any = None, *, persona: str | None = None, **options: Any) -> Self:
        """Add a node, as `StateGraph.add_node` does. An `Agent` brings its name and its `reads`.

        Args:
            node: Its name, or what runs; `action` and `options` as LangGraph's.
            persona: Of a function: for whose agents it speaks. It may write in their name, and edit what they said; by
                default all that it writes is its own, also what it has edited.

        Raises:
            InvalidRequestError: An agent is wrapped, by `with_retry` or `with_config`, say, or has a persona itself.
        """
        agent = node if action is None else action
        if isinstance(agent, RunnableBindingBase) and isinstance(agent.bound, Agent):
            raise InvalidRequestError(
                f"agent {agent.bound.name!r} is wrapped, so that its declarations cannot be read: add the agent "
                "itself, and give retries, caching and timeouts to add_node"
            )
        if not isinstance(agent, Agent) and any(True for _ in found(agent, Agent)):
            raise InvalidRequestError(
                "an agent stands in a sequence of runnables, where its declarations would bind nobody: make each step "
                "a node of its own"
            )
        if isinstance(agent, Agent) and persona is not None:
            raise InvalidRequestError(f"agent {agent.name!r} says itself whose node it is: Agent(persona={persona!r})")
        before = set(self.nodes)
        super().add_node(node, action, **options)
        self.personas |= {name: persona for name in self.nodes.keys() - before if persona is not None}
        if isinstance(agent, Agent):
            for source, rule in agent.rules.items():
                self._visibility.declare(source, node if isinstance(node, str) else agent.name, rule)
        return self

    def add_edge(
        self: Self,
        start_key: str | list[str],
        end_key: str,
        *,
        visibility: Mode | Rule | Mapping[str, Mode | Rule] | None = None,
        history: History | None = None,
        scope: Scope | Sequence[str] | None = None,
    ) -> Self:
        """Add an edge and say what the node at its end sees of the node at its start.

        Args:
            start_key: One node, or several that must all be done.
            end_key: The reader.
            visibility: `"shared"` (the default), `"private"` or `"reencoded"`; a `VisibilityMode` of yours; a `Rule`;
                or a dict from source to one of these, which says all that this edge declares: `{}` makes it mere
                control flow.
            history: `"all"` messages (the default), those of the `"last"` superstep, or of the last k.
            scope: What re-encoded words attend to: the `"reader"`'s view so far (the default), the `"public"` root
                alone, or private contexts by name.

        Raises:
            VisibilityError: No such mode, END has no view, or the pair was declared otherwise before.
        """
        explicit = visibility is not None or history is not None or scope is not None
        if end_key == END and explicit:
            raise VisibilityError("END sees nothing: leave visibility, history and scope out")
        starts = [start_key] if isinstance(start_key, str) else start_key
        rules = _declared(visibility, [start for start in starts if start != end_key], history, scope)
        super().add_edge(start_key, end_key)
        if end_key != END:
            for source, rule in rules.items():
                self._visibility.declare(source, end_key, rule, explicit=explicit)
        return self

    def add_conditional_edges(
        self: Self,
        source: str,
        path: Any,
        path_map: Any = None,
        *,
        visibility: Mode | Rule | Mapping[str, Mode | Rule] | None = None,
    ) -> Self:
        """As `StateGraph.add_conditional_edges`; targets that are known beforehand see the source, as over an edge.

        Args:
            source: The node after which control branches; `path` and `path_map` as LangGraph's.
            path: Says where.
            path_map: The targets, if `path` does not name them in its return type.
            visibility: As for `add_edge`, for every target.
        """
        before = set(self.branches.get(source, {}))
        super().add_conditional_edges(source, path, path_map)
        for name, branch in self.branches[source].items():
            if name in before:
                continue
            for target in (branch.ends or {}).values():
                starts = [source] if source != target else []
                for start, rule in ({} if target == END else _declared(visibility, starts)).items():
                    self._visibility.declare(start, target, rule, explicit=visibility is not None)
        return self

    def share(
        self: Self,
        source: str,
        reader: str,
        mode: Mode | Rule = SHARED,
        *,
        history: History | None = None,
        scope: Scope | Sequence[str] | None = None,
    ) -> Self:
        """Let `reader` see `source` without any control flow between them."""
        self._visibility.declare(source, reader, rule_of(mode, history, scope))
        return self

    def visibility_table(self) -> dict[str, dict[str, Rule]]:
        """Every declaration, by reader and source, as plain data."""
        return {reader: dict(rules) for reader, rules in self._visibility.rules.items()}

    def with_rule(self: Self, source: str, reader: str, rule: Mode | Rule) -> Self:
        """A copy in which one reader sees one source otherwise, whatever was declared."""
        changed = self._copied()
        changed._visibility.change(source, reader, rule_of(rule))
        return changed

    def with_policy(self: Self, policy: Policy) -> Self:
        """A copy with another policy."""
        changed = self._copied()
        changed.policy = policy
        return changed

    def with_system(self: Self, node: str, text: str) -> Self:
        """A copy in which one agent, or all agents of a persona, have another system prompt.

        Raises:
            VisibilityError: There is no such agent.
            InvalidRequestError: It has a prompt of a schema instead.
        """
        changed = self._copied()
        changed.nodes = with_system(self.nodes, node, text)
        return changed

    def _copied(self: Self) -> Self:
        copied = copy.copy(self)
        copied.nodes, copied.edges = dict(self.nodes), set(self.edges)
        copied.waiting_edges = set(self.waiting_edges)
        copied.branches = defaultdict(dict, {source: dict(each) for source, each in self.branches.items()})
        copied.personas = dict(self.personas)
        copied._visibility = self._visibility.copy()
        return copied

    def reads_of(self, name: str, agent: Agent) -> dict[str, Rule]:
        """The rules by which an agent reads as the node of that name."""
        return self._visibility.reads(name)

    def chart(self, engine: Engine | None = None) -> Chart:
        """The graph as the audit sees it, that of subgraphs included; served by `engine` where agents have none."""
        return chart_of(self, engine=engine)

    def audit(self) -> AuditReport:
        """Who can be influenced by which private context, and how: from the graph alone, whatever is said in it.

        Raises:
            VisibilityError: A declaration names no node or private context.
        """
        _require_names(self)
        if self._charted is not None:
            return audit_chart(self._charted, self._changed)
        chart, changed = harmless(self.chart()) if self.policy.on_violation == "reencode" else (self.chart(), [])
        return audit_chart(chart, changed)

    def compile(
        self, checkpointer: Any = None, *, engine: Engine | None = None, tenant: Resolver | None = None, **options: Any
    ) -> CompiledChoreoGraph:
        """Compile as `StateGraph.compile` does, bind every agent to `engine` and to what it may read.

        The graph itself is not changed: it can be compiled again with another engine. Given `tenant`, each run is
        served for the tenant that it names (see `Resolver`), and threads are their first tenant's: for any other they
        raise `ForeignThreadError`. Else all is the engine's own tenant's.

        Raises:
            VisibilityError: A declaration names no node, a path would break a promise, or a view must outgrow the
                model's context.
            InvalidRequestError: An agent has no engine.
            PMLError: A prompt's schema is longer than the model's context, or an argument than its slot.
        """
        _require_names(self)
        bound = self._copied()
        bound.origin, bound.tenancy = self._copied(), None if tenant is None else Tenancy(tenant)
        whole = self.chart(engine)
        if engine is not None and engine.method != "choreo":
            whole = whole.all_reencoded()
        whole, changed = kept(whole, self.policy.on_violation)
        bound._changed, bound._charted = tuple(changed), whole
        for hop in bound._changed:
            bound._visibility.change(hop.source, hop.reader, whole.node(hop.reader).rules[hop.source])
        stops = [*(options.get("interrupt_before") or ()), *(options.get("interrupt_after") or ())]
        require_bounded_loops(self, whole, self.nodes if "*" in stops else stops)
        bound.nodes = {}
        declared = Declared(whole, TextsByModel(bound))
        for name, spec in self.nodes.items():
            node: Any = spec.runnable
            if isinstance(node, Agent):
                bound.nodes[name] = bound_agent(bound, self.nodes, name, engine, declared, by_tenant=tenant is not None)
            else:
                signing = partial(sign, persona=self.personas.get(name))
                bound.nodes[name] = replace(spec, runnable=node | RunnableLambda(signing, name=f"sign {name}"))
        agents = {name: spec.runnable for name, spec in bound.nodes.items() if isinstance(spec.runnable, Agent)}
        early = {
            name: agent for name, agent in agents.items() if isinstance(agent, Synthesizer) and agent.quorum is not None
        }
        if tenant is not None:
            require_by_tenant(bound, agents, agents_of(bound))
        rewire(bound, agents, early, {when: options.get(f"interrupt_{when}") or () for when in ("before", "after")})
        bound.engine = engine or next((each.engine for each in agents_of(bound) if each.engine is not None), None)
        compiled = super(ChoreoGraph, bound).compile(checkpointer, **options)
        return relabelled(compiled, CompiledChoreoGraph)


def _require_names(graph: ChoreoGraph) -> None:
    """Raise `VisibilityError` if a declaration names no node or private context."""
    chart = graph.chart()
    contexts = [context.name for context in chart.contexts()]
    # Whether agents think may be their model's to say, and this chart is of no engine: a graph is audited, and its
    # names are looked at, before one is given. So thoughts of any agent may be named.
    thoughts = {f"{name}.thoughts" for name, spec in graph.nodes.items() if isinstance(spec.runnable, Agent)}
    contexts += thoughts & graph.policy.confidential.keys()
    graph._visibility.require_nodes(graph.nodes)
    require_personas(graph.personas, graph.nodes)
    graph._visibility.require_contexts(named_contexts(graph.nodes))
    graph.policy.require_names(contexts, {node.persona for node in chart.nodes})


def _declared(
    visibility: Mode | Rule | Mapping[str, Mode | Rule] | None,
    starts: Sequence[str],
    history: History | None = None,
    scope: Scope | Sequence[str] | None = None,
) -> dict[str, Rule]:
    """What an edge declares, by source."""
    if isinstance(visibility, Mapping):
        return {source: rule_of(spelling, history, scope) for source, spelling in visibility.items()}
    rule = rule_of(visibility, history, scope)
    return dict.fromkeys(starts, rule)


class CompiledChoreoGraph(TenantThreads):
    """A `CompiledStateGraph` whose drawing shows visibilities as edge labels."""

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
        assert isinstance(self.builder, ChoreoGraph)
        called, engine = called_with(self, config), self.builder.engine
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
        assert isinstance(self.builder, ChoreoGraph)
        if state is None:
            return self.builder.audit()
        engines = {agent.engine for agent in self.agents() if agent.engine is not None}
        if engine is None and len(engines) != 1:
            raise InvalidRequestError(f"the agents of this graph have {len(engines)} engines: give audit(engine=...)")
        entries = state.get("handles") if isinstance(state, Mapping) else getattr(state, "handles", None)
        serving = engine if engine is not None else engines.pop()
        declared = Declared(self.builder.chart(), TextsByModel(self.builder))
        return audit_entries(serving, declared, entries or [])

    def _labelled(self, graph: Graph) -> Graph:
        assert isinstance(self.builder, ChoreoGraph)
        table = self.builder.visibility_table()
        drawn = {(edge.source, edge.target) for edge in graph.edges}
        edges = [self._label(edge, table) for edge in graph.edges]
        for reader, rules in table.items():
            for source, rule in rules.items():
                if (source, reader) not in drawn and {source, reader} <= graph.nodes.keys():
                    edges.append(Edge(source, reader, data=rule.words(), conditional=True))
        graph.edges = edges
        return graph

    @staticmethod
    def _label(edge: Edge, table: Mapping[str, Mapping[str, Rule]]) -> Edge:
        rule = table.get(edge.target, {}).get(edge.source)
        return edge if rule is None or edge.data else edge._replace(data=rule.words())


__all__ = ["START", "ChoreoGraph", "CompiledChoreoGraph"]
