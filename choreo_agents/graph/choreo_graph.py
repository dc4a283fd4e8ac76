"""`ChoreoGraph`: a LangGraph `StateGraph` whose edges declare what each node may see."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, get_args

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent, Synthesizer, mode_of_strategy
from choreo_agents.graph.audit.chart import Chart, Policy
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.audit.static import audit_chart, chart_as_run
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.compiling import (
    DeclaringGraph,
    agents_among,
    agents_of,
    bind_graph,
    chart_of,
    destinations_of,
    find_runnable,
    require_names,
    require_whole_agent,
)
from choreo_agents.graph.drawing import Drawing, draw_audit
from choreo_agents.graph.engines import EngineChoice
from choreo_agents.graph.langgraph_internals import relabelled
from choreo_agents.graph.run_context import LineageChoice, Resolver
from choreo_agents.graph.state import ChoreoState
from choreo_agents.graph.visibility import (
    EVERYONE,
    REENCODED,
    SHARED,
    History,
    Mode,
    Positions,
    Scope,
    VisibilityRule,
    VisibilityTable,
    rule_of,
)
from choreo_agents.synthesis.placing import Strategy, require_strategy

EdgeVisibility = Mode | VisibilityRule | Mapping[str, Mode | VisibilityRule] | None
"""The visibility of an edge's start to its end, or of several sources by name; None: the default."""


class ChoreoGraph(DeclaringGraph):
    """A LangGraph `StateGraph` for agents that hand each other KV-cache handles.

    Args:
        state_schema: `ChoreoState`, or a TypedDict that extends it.
        system: The public root: a system prompt that every view starts with, encoded once.
        policy: Promises about private contexts beyond what is declared `private`.
        positions: Positions of the messages of a view, unless an agent has others (see `Agent`).
        visibility: Mode in which every agent sees all nodes without a declaration, as in programs that pass on all
            messages; edges are then control flow. Confidential messages are still only for readers that they are
            declared to. By default an agent sees the nodes that it has edges from.
        **options: As for `StateGraph`.
    """

    @refuses_unknown(StateGraph)
    def __init__(
        self,
        state_schema: type[Any] = ChoreoState,
        *,
        system: str | None = None,
        policy: Policy | None = None,
        positions: Positions = "sequential",
        visibility: Mode | VisibilityRule | None = None,
        **options: Any,
    ) -> None:
        super().__init__(state_schema, **options)
        if positions not in get_args(Positions):
            raise VisibilityError(f"positions must be 'sequential' or 'parallel', not {positions!r}")
        self.system = system
        if not isinstance(policy, Policy | None):
            raise InvalidRequestError(f"policy must be a Policy, as in Policy(on_violation='warn'), not {policy!r:.80}")
        self.policy = policy or Policy()
        self.positions = positions
        self.personas, self.control_flow = {}, set()
        self.table = VisibilityTable(default=None if visibility is None else rule_of(visibility))

    @refuses_unknown(StateGraph.add_node)
    def add_node(
        self,
        node: Any,
        action: Any = None,
        *,
        persona: str | None = None,
        writes: tuple[()] | None = None,
        **options: Any,
    ) -> Self:
        """Add a node, as `StateGraph.add_node` does. An `Agent` brings its name and its `reads`.

        Args:
            node: Its name, or the runnable; `action` and `options` as LangGraph's.
            persona: For a function: the persona it speaks for. It may write in the name of that persona's agents, and
                edit their messages; by default all that it writes is its own, edited messages included.
            writes: `()`: it writes neither messages nor handles, as a router, a counter or a barrier, and its readers
                see what it sees. None: it may.

        Raises:
            InvalidRequestError: An agent is wrapped, or is given a persona here; or `writes` is not `()`, or given for
                a node that is no function.
        """
        agent = node if action is None else action
        if isinstance(agent, str):
            raise InvalidRequestError(f"node {node!r} has no action: call add_node(Agent({node!r})), or pass an action")
        if isinstance(agent, type) and issubclass(agent, Agent):
            raise InvalidRequestError(
                f"{agent.__name__} is a class, not an agent: pass an instance, {agent.__name__}(name)"
            )
        require_whole_agent(agent)
        if isinstance(agent, Agent) and persona is not None:
            raise InvalidRequestError(f"agent {agent.name!r} sets its persona itself: use Agent(persona={persona!r})")
        graphs = [*find_runnable(agent, CompiledStateGraph)]
        inside = [*find_runnable(agent, Agent), *(member for inner in graphs for member in agents_of(inner.builder))]
        if writes is not None and (inside or graphs or persona is not None or tuple(writes)):
            raise InvalidRequestError(
                f"writes={writes!r} is not supported: only (), for functions without persona that write no messages"
            )
        before = set(self.nodes)
        if isinstance(agent, Agent) and agent.on_output is not None:
            options = {"destinations": destinations_of(agent.on_output)} | options
        super().add_node(node, action, **options)
        added = {name for name in self.nodes.keys() - before if not self.nodes[name].is_error_handler}
        self.personas |= dict.fromkeys(added, persona) if persona is not None else {}
        self.table.describe(
            silent=added if writes is not None else (),
            confidential=added if any(member.confidential for member in inside) else (),
            personas=_instructed({name: self.nodes[name] for name in added}),
        )
        if isinstance(agent, Agent):
            for source, rule in agent.rules.items():
                self.table.declare(source, node if isinstance(node, str) else agent.name, rule)
        return self

    @refuses_unknown()
    def add_edge(
        self,
        start_key: str | list[str],
        end_key: str,
        *,
        visibility: EdgeVisibility = None,
        history: History | None = None,
        scope: Scope | Sequence[str] | None = None,
    ) -> Self:
        """Add an edge and declare what the node at its end sees of the node at its start.

        Args:
            start_key: One node, or several that must all be done.
            end_key: The reader.
            visibility: `"shared"` (the default), `"private"` or `"reencoded"`; a `VisibilityMode` of yours; a
                `VisibilityRule`; or a dict from source to one of these, which is all that this edge declares: `{}`
                makes it mere control flow. From START to an agent with a system prompt the default is `"reencoded"`:
                input stands behind that prompt.
            history: `"all"` messages (the default), those of the `"last"` superstep, or of the last k.
            scope: The context that re-encoded text attends to: the `"reader"`'s view so far (the default), the
                `"public"` root alone, or private contexts by name.

        Raises:
            VisibilityError: There is no such mode, END is given a visibility, or the pair was declared otherwise
                before.
        """
        if end_key == END and (visibility, history, scope) != (None, None, None):
            raise VisibilityError("END reads nothing: leave visibility, history and scope out")
        if start_key == START and scope is not None and visibility is None:
            visibility = REENCODED
        starts = [start_key] if isinstance(start_key, str) else start_key
        self._declare(starts, end_key, visibility, history=history, scope=scope)
        return super().add_edge(start_key, end_key)

    def add_conditional_edges(
        self,
        source: str,
        path: Any,
        path_map: Any = None,
        *,
        visibility: EdgeVisibility = None,
    ) -> Self:
        """Add a route, as `StateGraph.add_conditional_edges` does; known targets see the source, as over an edge.

        Args:
            source: The node after which control branches; `path` and `path_map` as LangGraph's.
            path_map: The targets, if `path` does not name them in its return type.
            visibility: As for `add_edge`, for every target.
        """
        before = set(self.branches.get(source, {}))
        super().add_conditional_edges(source, path, path_map)
        for name, branch in self.branches[source].items():
            if name in before:
                continue
            if branch.ends is None and visibility is not None:
                self.control_flow.add((source, EVERYONE))
            for target in (branch.ends or {}).values():
                self._declare([source], target, visibility)
        return self

    def _declare(self, starts: Sequence[str], end: str, visibility: EdgeVisibility, **limits: Any) -> None:
        """Declare what an edge lets its end see of its starts."""
        spelled = visibility if isinstance(visibility, Mapping) else {s: visibility for s in starts if s != end}
        rules = {source: rule_of(spelling, **limits) for source, spelling in spelled.items()}
        self.control_flow |= {(start, end) for start in starts if start not in rules}
        explicit = visibility is not None or any(limit is not None for limit in limits.values())
        for source, rule in rules.items() if end != END else ():
            self.table.declare(source, end, rule, explicit=explicit, has_mode=visibility is not None)

    def set_visibility(
        self,
        source: str,
        reader: str,
        mode: Mode | VisibilityRule = SHARED,
        *,
        history: History | None = None,
        scope: Scope | Sequence[str] | None = None,
    ) -> Self:
        """Let `reader` see `source` without any control flow between them."""
        self.table.declare(source, reader, rule_of(mode, history, scope))
        return self

    def visibility_table(self) -> dict[str, dict[str, VisibilityRule]]:
        """Return every declaration, by reader and source, as plain data; source `"*"`: all others."""
        return self.table.declared(self.nodes)

    def with_rule(self, source: str, reader: str, rule: Mode | VisibilityRule) -> Self:
        """Return a copy in which one reader sees one source by another rule, whatever was declared."""
        changed = self._copy()
        changed.table.change(source, reader, rule_of(rule), explicit=True)
        return changed

    def with_policy(self, policy: Policy) -> Self:
        """Return a copy with another policy."""
        changed = self._copy()
        changed.policy = policy
        return changed

    def with_system(self, node: str, text: str) -> Self:
        """Return a copy in which an agent, or all agents of a persona, have another system prompt.

        Raises:
            InvalidRequestError: An agent has a prompt of a schema instead.
            VisibilityError: There is no such agent or persona.
        """
        agents = {n: agent.with_system(text) for n, agent in agents_among(self.nodes) if node in (n, agent.persona)}
        if not agents:
            raise VisibilityError(f"the graph has no agent or persona named {node!r}: {', '.join(self.nodes)}")
        changed = self._copy()
        changed.nodes |= {name: replace(self.nodes[name], runnable=agent) for name, agent in agents.items()}
        changed.table.describe(personas=_instructed(changed.nodes))
        return changed

    def with_strategy(self, strategy: Strategy) -> Self:
        """Return a copy in which all synthesizers merge by another strategy.

        Raises:
            InvalidRequestError: The graph has no synthesizer, or there is no such strategy.
        """
        require_strategy(strategy)
        changed = self._copy()
        merging = {name: spec for name, spec in self.nodes.items() if isinstance(spec.runnable, Synthesizer)}
        for name, spec in merging.items():
            node: Any = spec.runnable
            for source, rule in self.table.reads(name, self.nodes).items():
                if source in node.merging.sources and rule.mode == mode_of_strategy(node.strategy):
                    merged = VisibilityRule(mode_of_strategy(strategy), rule.history, rule.scope)
                    changed.table.change(source, name, merged, explicit=True)
            changed.nodes[name] = replace(spec, runnable=node.merging_by(strategy))
        if not merging:
            raise InvalidRequestError("the graph has no synthesizer whose strategy could be set")
        return changed

    def _copy(self) -> Self:
        copied = copy.copy(self)
        copied.nodes, copied.edges = dict(self.nodes), set(self.edges)
        copied.waiting_edges = set(self.waiting_edges)
        copied.branches = defaultdict(dict, {source: dict(routes) for source, routes in self.branches.items()})
        copied.personas, copied.control_flow = dict(self.personas), set(self.control_flow)
        copied.audited = None
        copied.table = self.table.copy()
        return copied

    def chart(self) -> Chart:
        """Return the chart of the graph and its subgraphs."""
        return chart_of(self)

    def audit(self) -> AuditReport:
        """Report which private contexts can influence which agents: from the graph alone, for any run.

        Raises:
            VisibilityError: A declaration names no node or private context.
        """
        if self.audited is not None:  # the builder of a compiled graph
            return self.audited
        require_names(self)
        return audit_chart(*chart_as_run(self.chart(), self.policy.on_violation))

    def draw(self) -> Drawing:
        """Return the graph as a Mermaid flowchart: see `CompiledChoreoGraph.draw`."""
        return Drawing(draw_audit(self, self.audit()))

    def _repr_markdown_(self) -> str:
        try:
            return self.draw()._repr_markdown_()
        except VisibilityError:  # the graph is still being built: a declaration may name a node that is added later
            return f"`{self!r}`"

    def __repr__(self) -> str:
        return f"ChoreoGraph({', '.join(self.nodes)})"

    @refuses_unknown(StateGraph.compile)
    def compile(
        self,
        checkpointer: Any = None,
        *,
        engine: EngineChoice | None = None,
        tenant: Resolver | None = None,
        strict: bool = False,
        lineage: LineageChoice = None,
        **options: Any,
    ) -> CompiledChoreoGraph:
        """Compile as `StateGraph.compile` does, and bind every agent to `engine` and to what it may read.

        The graph itself is not changed: it can be compiled again with another engine. Several engines, one for each
        model, are given by name, which agents choose from: `{"small": ..., "large": ...}`. Messages of another model
        are encoded again, once for all readers of a model; with `strict` they raise `ForeignHandleError` where
        encodings are shared. With `tenant`, each run is served for the tenant that it names (see `Resolver`), and a
        thread belongs to its first tenant: for any other it raises `ForeignThreadError`. The lineage of messages is
        kept in `lineage`, a store, from which other processes go on: by default `store`, or beside a SQLite
        checkpointer; False: nowhere.

        Raises:
            VisibilityError: A declaration names no node, a path would break a promise, or a view must outgrow the
                model's context.
            InvalidRequestError: An agent has no engine, or names none; or the engines are several tenants' or run one
                model.
            PMLError: A prompt's schema is longer than the model's context, or an argument than its slot.
        """
        bound = self._copy()
        bound.origin, bound.resolver, bound.lineage = self._copy(), tenant, lineage
        bound.served = {"engine": engine, "strict": strict}
        stops = [*(options.get("interrupt_before") or ()), *(options.get("interrupt_after") or ())]
        bind_graph(bound, stops)
        compiled = super(ChoreoGraph, bound).compile(checkpointer, **options)
        return relabelled(compiled, CompiledChoreoGraph)


def _instructed(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Return the personas of the agents that have a system prompt, by node."""
    return {name: agent.persona or name for name, agent in agents_among(nodes) if agent.system is not None}
