"""Reads a graph into a chart for the audit: its nodes, those of its subgraphs, and what the audit cannot prove."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables import Runnable, RunnableParallel, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.chat import own_turns
from choreo_agents.engine import Engine
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.audit.influence import Declared, OwnTexts
from choreo_agents.graph.audit.policy import Policy
from choreo_agents.graph.audit.report import AuditReport, Hop
from choreo_agents.graph.engines import Engines
from choreo_agents.graph.langgraph_internals import AroundNode
from choreo_agents.graph.run_context import LineageChoice, Resolver
from choreo_agents.graph.view.imported_prompt import confidential_modules, has_own_words
from choreo_agents.graph.visibility import START_SOURCE, Positions, VisibilityRule, VisibilityTable
from choreo_agents.graph.words.thoughts import thinks
from choreo_agents.models import ModelAdapter, instructions


class DeclaringGraph(StateGraph[Any, Any, Any, Any]):
    """The declarations of a `ChoreoGraph`, for the modules that read, bind, draw and run them."""

    system: str | None
    policy: Policy
    positions: Positions
    table: VisibilityTable
    personas: dict[str, str]
    """The persona that a function speaks for, by node."""
    control_flow: set[tuple[str, str]]
    """Pairs (source, reader) whose edge is declared to be control flow only; reader `EVERYONE`: all targets of a
    route."""
    origin: DeclaringGraph
    """The graph from which it was compiled. This and the fields below hold for a compiled graph's builder."""
    served: Mapping[str, Any] = {}
    """The arguments `engine` and `strict` that it was compiled with."""
    audited: AuditReport | None = None
    engine: Engine | None = None
    """The engine that signs its messages; None: it has no agents."""
    engines: tuple[Engine, ...] = ()
    """All engines that serve it, those of subgraphs included."""
    declared = Declared()
    """All declarations, as the graph runs."""
    changed: tuple[tuple[Hop, VisibilityRule], ...] = ()
    """The edges that the policy re-encodes, and their new rules."""
    resolver: Resolver | None = None
    """Returns the tenant of a run; None: all runs are one tenant's."""
    lineage: LineageChoice = None


def chart_of(builder: StateGraph[Any, Any, Any, Any], prefix: str = "", engines: Engines | None = None) -> Chart:
    """Return the chart of a graph with all that its subgraphs hold.

    Args:
        builder: The graph, compiled or not.
        prefix: Path of the graph, with a `|` at its end: `team|`.
        engines: Engines for the agents that have none yet; None: not known yet.
    """
    own = builder if isinstance(builder, DeclaringGraph) else None
    nodes: list[ChartNode] = []
    outside: list[str] = []
    policies: list[tuple[str, Policy]] = []
    for name, spec in builder.nodes.items():
        path = prefix + name
        inner = _graph_in(path, spec.runnable, is_ours=own is not None)
        agent = next(find_runnable(spec.runnable, Agent), None)
        if inner is None and agent is None:
            persona = prefix + (name if own is None else own.personas.get(name, name))
            is_silent = own is not None and name in own.table.silent
            nodes.append(ChartNode(path, persona=persona, is_function=True, is_silent=is_silent))
            clause = "" if is_silent else "says in a person's name, "
            outside.append(f"the function {path!r}: what it reads, calls, {clause}and where it sends control")
            continue
        table = _own_table(name, agent if inner is None else None) if own is None else own.table
        reads = table.reads(name, builder.nodes)
        rules = {s if s == START_SOURCE else prefix + s: _prefix_contexts(rule, prefix) for s, rule in reads.items()}
        undeclared = frozenset(prefix + source for source in table.undeclared(name, builder.nodes) or ())
        if inner is not None:
            chart = chart_of(inner.builder, f"{path}|", engines)
            nodes += (_narrow_node(node, rules, undeclared) for node in chart.nodes)
            outside += chart.outside
            policies += chart.policies
        elif agent is not None:
            node = _agent_node(agent, path, prefix + (agent.persona or name), engines)
            nodes.append(replace(node, rules=rules, undeclared=undeclared))
            for label, prompt in (("prompt", agent.prompt), ("system prompt", agent.system)):
                if callable(prompt):
                    outside.append(f"the {label} of {path!r}, which a function makes from the state")
            if agent.history is not None and agent.history.summary is not None:
                outside.append(f"the summary that a function makes of what {path!r} does not see any more")
            if agent.on_output is not None:
                outside.append(f"the update of {path!r}: what its function writes, and where it sends control")
            if callable(agent.choices):
                outside.append(f"the answers that {path!r} may give, which a function makes from the state")
    for source, branches in builder.branches.items():
        outside += [f"the route that {route!r} takes after {prefix + source!r}" for route in branches]
    if builder.branches or any(node.is_function or node.routes for node in nodes):
        paths = {prefix + name for name in builder.nodes}
        nodes = [replace(n, may_be_sent=True) if n.name in paths and not n.is_function else n for n in nodes]
    modules = {module for node in nodes for module in node.modules}
    policies += [(prefix, own.policy.within(prefix, modules))] if own is not None and own.policy.confidential else []
    chart = Chart(tuple(nodes), tuple(outside), tuple(policies))
    for hop, rule in () if own is None else own.changed:
        chart = chart.with_rule(prefix + hop.source, prefix + hop.reader, _prefix_contexts(rule, prefix))
    return chart


def _own_table(name: str, agent: Agent | None) -> VisibilityTable:
    """Return the visibility table of an agent in a stock `StateGraph`, which declares itself what it reads."""
    table = VisibilityTable()
    for source, rule in ({} if agent is None else agent.rules).items():
        table.declare(source, name, rule)
    return table


def _graph_in(path: str, runnable: Any, *, is_ours: bool) -> Any:
    """Return the graph that a node is, or has among its steps; None: it has none.

    Args:
        path: The node's path.
        runnable: The node.
        is_ours: True in a `ChoreoGraph`, False in a stock `StateGraph`.

    Raises:
        VisibilityError: The declarations cannot hold for the agents in there.
    """
    graphs = [*find_runnable(runnable, CompiledStateGraph)]
    speaking = [graph for graph in graphs if any(agents_of(graph.builder))]
    if len(speaking) > 1:
        raise VisibilityError(
            f"the node {path!r} holds {len(speaking)} graphs of agents, and what is declared of it is given to one: "
            "make each a node of its own"
        )
    if speaking and not is_ours and "handles" not in speaking[0].output_channels:
        raise VisibilityError(
            f"what agents say in {path!r} leaves it in words alone: the output_schema of that graph has no 'handles', "
            "and a StateGraph stands around it: derive it from ChoreoState"
        )
    return next(iter([*speaking, *graphs]), None)


def agents_of(builder: StateGraph[Any, Any, Any, Any]) -> Iterator[Agent]:
    """Yield all agents of a graph, those of its subgraphs included."""
    for spec in builder.nodes.values():
        yield from find_runnable(spec.runnable, Agent)
        for inner in find_runnable(spec.runnable, CompiledStateGraph):
            yield from agents_of(inner.builder)


def _agent_node(agent: Agent, path: str, persona: str, engines: Engines | None) -> ChartNode:
    prompt, served = agent.schema_prompt, agent.engine if engines is None else engines.of(agent)
    return ChartNode(
        path,
        persona,
        model="" if served is None else served.model.adapter.fingerprint,
        keeps_kv=served is None or served.method == "choreo",
        routes=agent.on_output is not None,
        has_system=agent.system is not None or bool(agent.tools) or (prompt is not None and has_own_words(prompt.tree)),
        has_prompt=agent.prompt is not None,
        confidential=agent.confidential,
        thinks=bool(agent.thinking) if served is None else thinks(agent, served.chat),
        calls=bool(agent.tools),
        recalls=served is not None and served.chat.thoughts is not None and served.chat.thoughts.kept,
        schema=None if prompt is None else prompt.schema.name,
        modules=() if prompt is None else confidential_modules(prompt),
    )


def _narrow_node(node: ChartNode, rules: Mapping[str, VisibilityRule], undeclared: frozenset[str]) -> ChartNode:
    """Return a subgraph's node with the sources that edges around the subgraph give it: no more than it sees of input.

    Raises:
        VisibilityError: The node cannot have them.
    """
    if node.is_function:
        return node
    merged = dict(node.rules)
    for source, rule in rules.items():
        try:
            if rule.contexts and node.rules[START_SOURCE].mode.shows:
                raise VisibilityError(f"words cannot be encoded there in {', '.join(rule.contexts)}")
            narrowed = rule.narrowed(node.rules[START_SOURCE])
        except VisibilityError as error:
            raise VisibilityError(f"what {source!r} says cannot be given to {node.name!r}: {error}") from error
        # A node that sees no input sees nothing of the source either, but nobody promised to keep the source out.
        if source == START_SOURCE or narrowed.mode.shows or not rule.mode.shows:
            merged[source] = narrowed
    return replace(node, rules=merged, undeclared=node.undeclared | (undeclared & merged.keys()))


def _prefix_contexts(rule: VisibilityRule, prefix: str) -> VisibilityRule:
    """Return a rule with the paths of its contexts."""
    return replace(rule, scope=tuple(prefix + name for name in rule.contexts)) if rule.contexts and prefix else rule


def find_runnable(runnable: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield the runnables of a kind that a node is, or has inside sequences, bindings, fallbacks and parallel steps."""
    if isinstance(runnable, kind):
        yield runnable
    elif isinstance(runnable, AroundNode):
        yield from find_runnable(runnable.node, kind)
    elif isinstance(runnable, RunnableSequence):
        steps: list[Runnable[Any, Any]] = runnable.steps
        for step in steps:
            yield from find_runnable(step, kind)
    elif isinstance(runnable, RunnableBindingBase):
        yield from find_runnable(runnable.bound, kind)
    elif isinstance(runnable, RunnableWithFallbacks):
        for inner in (runnable.runnable, *runnable.fallbacks):
            yield from find_runnable(inner, kind)
    elif isinstance(runnable, RunnableParallel):
        for inner in runnable.steps__.values():
            yield from find_runnable(inner, kind)


# Texts that the personas of a graph are given, as tokens


def texts_of(builder: StateGraph[Any, Any, Any, Any], engine: Engine, prefix: str = "") -> OwnTexts:
    """Return the tokens of system prompts, prompts of schemas and imported modules, by persona and name of the context.

    Args:
        builder: The graph, compiled.
        engine: The engine whose tokens are returned.
        prefix: Path of the graph, with a `|` at its end: `team|`.
    """
    own_texts: dict[str, dict[str, frozenset[tuple[int, ...]]]] = {}
    for name, spec in builder.nodes.items():
        for inner in find_runnable(spec.runnable, CompiledStateGraph):
            for persona, texts in texts_of(inner.builder, engine, f"{prefix}{name}|").items():
                own_texts.setdefault(persona, {}).update(texts)
        for agent in find_runnable(spec.runnable, Agent):
            persona = prefix + (agent.persona or name)
            own = own_texts.setdefault(persona, {})
            by_context = {} if agent.imported is None else agent.imported.texts(f"{persona}.system")
            fixed = agent.system if isinstance(agent.system, str) else None
            if fixed is not None or agent.tools:
                # Behind a public root they are later turns; behind private contexts also where there is no root.
                orders = {True, bool(agent.shared_system) or agent.imported is not None}
                forms = [form for later in orders for form in own_turns(fixed, agent.tools, engine.chat, later=later)]
                if fixed is not None:
                    forms.append(instructions(fixed, engine.chat, later=True))
                encoded = {tuple(engine.model.encode(form.text)) for form in forms}
                by_context = {**by_context, f"{persona}.system": {*by_context.get(f"{persona}.system", ()), *encoded}}
            for context, texts in by_context.items():
                own[context] = own.get(context, frozenset()) | texts
    return own_texts


class TextsByModel:
    """The tokens of `texts_of` for each engine, computed once per model.

    Args:
        builder: The graph, compiled.
    """

    def __init__(self, builder: StateGraph[Any, Any, Any, Any]) -> None:
        self._builder = builder
        self._texts: WeakKeyDictionary[ModelAdapter, OwnTexts] = WeakKeyDictionary()

    def __call__(self, engine: Engine) -> OwnTexts:
        adapter = engine.model.adapter
        if adapter not in self._texts:
            self._texts[adapter] = texts_of(self._builder, engine)
        return self._texts[adapter]
