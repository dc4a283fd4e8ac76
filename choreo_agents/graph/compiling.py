"""Reads the declarations of a graph into a chart, checks them, and binds each agent to its engine and its rules."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from langchain_core.runnables import (
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph import END, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from choreo_agents.chat import CompiledConstraints, own_turns, required_tools, thinks
from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.chart import Chart, ChartNode, OwnTexts, Policy
from choreo_agents.graph.audit.influence import Guard
from choreo_agents.graph.audit.report import AuditReport, Hop
from choreo_agents.graph.audit.static import CHANNELS, audit_chart, chart_as_run, require_kept, violations_of
from choreo_agents.graph.durable.finding import require_choice
from choreo_agents.graph.engines import Engines, choose_signer, require_distinct
from choreo_agents.graph.langgraph_internals import AroundNode, is_cached, merges_by
from choreo_agents.graph.nesting import placed_node, wrapped
from choreo_agents.graph.outputs import OWN_CHANNELS
from choreo_agents.graph.run_context import LineageChoice, Resolver
from choreo_agents.graph.signer import forward_sends, require_silent, sign
from choreo_agents.graph.state import merge_entries, merge_updates
from choreo_agents.graph.view.imported_prompt import confidential_modules, has_own_words, imported_by
from choreo_agents.graph.view.reader_rules import ReaderRules
from choreo_agents.graph.visibility import (
    EVERYONE,
    START_SOURCE,
    Positions,
    VisibilityRule,
    VisibilityTable,
    private_in,
)
from choreo_agents.models import LoadedModel, ModelAdapter, instructions

# The chart


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
    declared = Chart(())
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
            clause = "" if is_silent else "writes in a person's name, "
            outside.append(f"the function {path!r}: what it reads, calls, {clause}and where it routes")
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
                    outside.append(f"the {label} of {path!r}, which a function computes from the state")
            if agent.history is not None and agent.history.summary is not None:
                outside.append(f"the summary, by a function, of messages outside the history of {path!r}")
            if agent.on_output is not None:
                outside.append(f"on_output of {path!r}: what it writes, and where it routes")
            if callable(agent.choices):
                outside.append(f"the choices of {path!r}, which a function computes from the state")
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
            f"the node {path!r} has {len(speaking)} graphs of agents, but its declarations apply to one: make each a "
            "node of its own"
        )
    if speaking and not is_ours and "handles" not in speaking[0].output_channels:
        raise VisibilityError(
            f"messages of agents in {path!r} leave it as text only: the output_schema of that graph has no 'handles', "
            "and it is inside a StateGraph: derive the schema from ChoreoState"
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
        thinks=bool(agent.thinking) if served is None else thinks(served.chat, agent.thinking, agent.name),
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
                raise VisibilityError(f"text cannot be encoded in {', '.join(rule.contexts)} there")
            narrowed = rule.narrowed(node.rules[START_SOURCE])
        except VisibilityError as error:
            raise VisibilityError(f"messages of {source!r} cannot be passed to {node.name!r}: {error}") from error
        # A node that sees no input sees nothing of the source either, but nobody promised to keep the source out.
        if source == START_SOURCE or narrowed.mode.shows or not rule.mode.shows:
            merged[source] = narrowed
    return replace(node, rules=merged, undeclared=node.undeclared | (undeclared & merged.keys()))


def _prefix_contexts(rule: VisibilityRule, prefix: str) -> VisibilityRule:
    """Return a rule with the paths of its contexts."""
    return replace(rule, scope=tuple(prefix + name for name in rule.contexts)) if rule.contexts and prefix else rule


def find_runnable(runnable: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield the runnables of a kind that a node is, or has inside sequences, bindings, fallbacks and parallel steps."""
    parts: Iterable[Any] = ()
    if isinstance(runnable, kind):
        yield runnable
    elif isinstance(runnable, AroundNode):
        parts = [runnable.node]
    elif isinstance(runnable, RunnableSequence):
        parts = runnable.steps
    elif isinstance(runnable, RunnableBindingBase):
        parts = [runnable.bound]
    elif isinstance(runnable, RunnableWithFallbacks):
        parts = [runnable.runnable, *runnable.fallbacks]
    elif isinstance(runnable, RunnableParallel):
        parts = runnable.steps__.values()
    for part in parts:
        yield from find_runnable(part, kind)


# Texts that the personas of a graph are given, as tokens


def texts_of(builder: StateGraph[Any, Any, Any, Any], engine: Engine, prefix: str = "") -> OwnTexts:
    """Return the tokens of system prompts, prompts of schemas and imported modules, by persona and name of the context.

    Args:
        builder: The graph, compiled.
        engine: The engine whose tokens are returned.
        prefix: Path of the graph, with a `|` at its end: `team|`.
    """
    own_texts: dict[str, dict[str, set[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(set))
    for name, spec in builder.nodes.items():
        for inner in find_runnable(spec.runnable, CompiledStateGraph):
            for persona, texts in texts_of(inner.builder, engine, f"{prefix}{name}|").items():
                own_texts[persona].update({context: {*sequences} for context, sequences in texts.items()})
        for agent in find_runnable(spec.runnable, Agent):
            persona = prefix + (agent.persona or name)
            own, imported = own_texts[persona], imported_by(agent, agent.engine)
            for context, sequences in () if imported is None else imported.texts(f"{persona}.system").items():
                own[context] |= sequences
            fixed = agent.system if isinstance(agent.system, str) else None
            if fixed is not None or agent.tools:
                # Behind a public root they are later turns; behind private contexts also where there is no root.
                orders = {True, bool(agent.shared_system) or imported is not None}
                forms = [form for later in orders for form in own_turns(fixed, agent.tools, engine.chat, later=later)]
                if fixed is not None:
                    forms.append(instructions(fixed, engine.chat, later=True))
                own[f"{persona}.system"] |= {tuple(engine.model.encode(form.text)) for form in forms}
    return own_texts


def texts_by_model(builder: StateGraph[Any, Any, Any, Any]) -> Callable[[Engine], OwnTexts]:
    """Return `texts_of` of a compiled graph as a function of the engine, which computes it once per model."""
    by_model: WeakKeyDictionary[ModelAdapter, OwnTexts] = WeakKeyDictionary()

    def texts(engine: Engine) -> OwnTexts:
        adapter = engine.model.adapter
        if adapter not in by_model:
            by_model[adapter] = texts_of(builder, engine)
        return by_model[adapter]

    return texts


# Control flow: loops that cannot end, and pairs of agents without a declared visibility

_LISTED = 10
"""Most pairs that a log message lists."""


def log_unseen_pairs(builder: DeclaringGraph, chart: Chart) -> None:
    """Log, once per graph shape, which agents may run after others that they do not see, and how to change that."""
    pairs = unseen_pairs(builder, chart)
    shareable = _shareable(chart, [*islice(pairs, 2 * _LISTED)])
    lines = sorted(
        f"{reader!r} may run after {source!r} but does not see it: graph.set_visibility({source!r}, {reader!r})"
        for source, reader in shareable[:_LISTED]
    )
    if not lines:
        return
    if more := len(shareable[_LISTED:]) + sum(1 for _ in pairs):
        lines.append(f"and {more} more pairs")
    lines.append('ChoreoGraph(visibility="shared") lets everyone see everyone. Private pairs are not listed')
    _log_once("\n".join(lines))


@lru_cache(maxsize=1024)
def _log_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def unseen_pairs(builder: DeclaringGraph, chart: Chart) -> Iterator[tuple[str, str]]:
    """Yield every (source, reader) of a graph's own nodes where the reader may run after the source, sees nothing of
    it, and no declaration says so.

    Args:
        builder: The graph. A route without known targets may lead to any node; a function's `Command` leads where its
            annotation says.
        chart: The chart of the graph.
    """
    following = _following(builder, builder.nodes)
    for name, spec in builder.nodes.items():
        following[name] += [*(spec.ends or ()), *filter(None, [spec.error_handler_node])]
    later = {name: _after(name, following) for name in builder.nodes}
    for reader in chart.nodes:
        if reader.is_function or reader.name not in builder.nodes:
            continue
        for source in builder.nodes:
            speakers = [node for node in chart.inside(source) if not node.is_function]
            is_kin = any(node.persona == reader.persona for node in speakers)
            is_told = bool(builder.control_flow & {(source, reader.name), (source, EVERYONE)})
            is_kept = not speakers or any(node.confidential for node in speakers)
            if reader.name in later[source] and not (source in reader.rules or is_kin or is_told or is_kept):
                yield source, reader.name


def _shareable(chart: Chart, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the pairs of which each can be shared without breaking a promise."""

    def broken(*shared: tuple[str, str]) -> int:
        changed = chart
        for source, reader in shared:
            changed = changed.with_rule(source, reader, VisibilityRule())
        return len(violations_of(changed))

    if not chart.guarded and not any(chart.private_pairs()):
        return pairs
    before = broken()
    return pairs if broken(*pairs) <= before else [pair for pair in pairs if broken(pair) <= before]


def require_bounded_loops(builder: DeclaringGraph, chart: Chart, stops: Container[str]) -> None:
    """Raise `VisibilityError` if an agent is in a loop without an exit: its own messages alone outgrow the model's
    context.

    Nodes that may end a run or send control anywhere, by a `Command` or a route without known targets, count as exits.
    So do all functions, also those whose edges stay in the loop: any of them may `interrupt` the run, which may never
    be resumed.

    Args:
        builder: The graph.
        chart: The chart of the graph.
        stops: Nodes before or after which a run is interrupted: it goes on only if it is resumed.
    """
    agents = {node.name: node for node in chart.nodes if not node.is_function}
    following = _following(builder, [END])
    for name, after in following.items():
        if not after or name not in agents or agents[name].routes or name in stops:
            after.append(END)
    for name in builder.nodes:
        later = _after(name, following)
        if name in later and END not in later and name in agents:
            raise VisibilityError(
                f"{name!r} is in a loop without an exit: its view, at least its own messages, will exceed the model's "
                "context. Add an exit to the loop"
            )


def _following(builder: DeclaringGraph, anywhere: Iterable[str]) -> dict[str, list[str]]:
    """Return for each node those that may run after it.

    Args:
        builder: The graph.
        anywhere: The nodes that may come after a route without known targets.
    """
    following: dict[str, list[str]] = {name: [] for name in builder.nodes}
    edges = [*builder.edges, *((start, end) for starts, end in builder.waiting_edges for start in starts)]
    goes_on = {start for start, end in builder.edges if end != END}
    for start, end in edges:
        # A node with another edge goes on in spite of its edge to END.
        if start in following and (end != END or start not in goes_on):
            following[start].append(end)
    for name in following:
        for branch in builder.branches.get(name, {}).values():
            following[name] += anywhere if branch.ends is None else branch.ends.values()
    return following


def _after(start: str, following: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all that may run after a node: itself only if it is in a loop."""
    later, queue = set[str](), [start]
    for name in queue:
        new = set(following.get(name, ())) - later
        later |= new
        queue += new
    return later


# Checks of nodes and state


def require_whole_agent(node: Any) -> None:
    """Raise `InvalidRequestError` if an agent is wrapped or stands among other steps, which would hide its
    declarations."""
    if not isinstance(node, Agent) and any(True for _ in find_runnable(node, Agent)):
        raise InvalidRequestError(
            "an agent is wrapped, or inside a sequence of runnables, so that its declarations have no effect: add the "
            "agent itself, with its tags and metadata, pass retries, caching and timeouts to add_node, and make each "
            "step a node of its own"
        )


def destinations_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the nodes that a function's annotation sends control to: `-> Command[Literal["pro", "con"]]`."""
    try:
        returned = get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None
    for kind in (returned, *get_args(returned)):
        targets = get_args(kind)[0] if get_origin(kind) is Command else None
        if get_origin(targets) is Literal:
            return tuple(map(str, get_args(targets)))
    return None


def require_schemas(graph: DeclaringGraph) -> None:
    """Raise `VisibilityError` if a subgraph's input or output schema has no `messages`, so that a declared rule cannot
    hold."""
    nodes = graph.nodes.items()
    graphs = {name: inner.builder for name, spec in nodes for inner in find_runnable(spec.runnable, CompiledStateGraph)}
    for source, reader, rule in graph.table.explicit():
        for node, end in ((source, "output_schema"), (reader, "input_schema")):
            builder: Any = graphs[node] if rule.mode.shows and node in graphs else None
            schema = getattr(builder, end) if builder is not None and any(agents_of(builder)) else None
            if schema is not None and "messages" not in builder.schemas[schema]:
                raise VisibilityError(
                    f"the visibility of {source!r} to {reader!r} cannot be {rule.words()!r}: {schema.__name__}, the "
                    f"{end} of {node!r}, has no 'messages': derive it from ChoreoState"
                )


def require_channels(graph: StateGraph[Any, Any, Any, Any]) -> None:
    """Raise `InvalidRequestError` if the state has no channels for the agents' messages and handles."""
    if not any(agents_among(graph.nodes)):
        return
    missing = [name for name in ("handles", "messages") if name not in graph.channels]
    handles, schema = graph.channels.get("handles"), graph.state_schema.__name__
    if missing:
        raise InvalidRequestError(
            f"the state {schema} has no {' and no '.join(map(repr, missing))}, which agents write: derive it from "
            f"ChoreoState, as class {schema}(ChoreoState)"
        )
    if not merges_by(handles, merge_entries, merge_updates):
        raise InvalidRequestError(
            f"the 'handles' of the state {schema} have another reducer: derive it from ChoreoState, and leave that "
            "channel unchanged"
        )


# Binding agents


def bind_graph(bound: DeclaringGraph, stops: Sequence[str]) -> None:
    """Check a graph, and bind its agents to their engines and to what they may read.

    Args:
        bound: The copy of the graph that is bound, with the arguments that it is compiled with. Its `origin` stays as
            it is.
        stops: Nodes before or after which a run is interrupted.

    The errors are those of `ChoreoGraph.compile`.
    """
    origin, tenant, engines = bound.origin, bound.resolver, Engines(bound.served["engine"])
    if tenant is not None and not callable(tenant):
        raise InvalidRequestError(f"tenant must be a function from a run's config to a salt, not {tenant!r}")
    require_names(origin)
    require_channels(origin)
    require_schemas(origin)
    whole, changed = chart_as_run(chart_of(origin, engines=engines).as_served(), origin.policy.on_violation)
    require_kept(whole, origin.policy.on_violation)
    bound.declared, bound.audited = replace(whole, texts=texts_by_model(bound)), audit_chart(whole, changed)
    # Agents are bound to the rules that the policy re-encoded.
    bound.changed = tuple((hop, whole.by_name[hop.reader].rules[hop.source]) for hop in changed)
    for hop, rule in bound.changed:
        if hop.reader in bound.nodes:  # agents of subgraphs get their rules from the chart at run time
            bound.table.change(hop.source, hop.reader, rule)
    log_unseen_pairs(origin, whole)
    require_bounded_loops(origin, whole, origin.nodes if "*" in stops else stops)
    bound.nodes = {name: replace(spec, **_bound_node(bound, name, engines)) for name, spec in bound.nodes.items()}
    for routes in bound.branches.values():
        # Routes send messages on with the metadata that they have in the state.
        forward = partial(forward_sends, fresh=True)
        routes |= {name: route._replace(path=wrapped(route.path, finish=forward)) for name, route in routes.items()}
    if tenant is not None:
        require_by_tenant(bound)
    bound.engines = require_distinct([*engines.engines, *(agent.engine for agent in agents_of(bound))])
    bound.engine = choose_signer(bound.engines)
    require_choice(bound.lineage, bound.engine, by_tenant=tenant is not None)


def _bound_node(bound: DeclaringGraph, name: str, engines: Engines) -> dict[str, Any]:
    """Return what changes in a node of a compiled graph: agents get rules, and updates of functions are signed."""
    node: Any = bound.nodes[name].runnable
    if isinstance(node, Agent):
        agent = bound_agent(bound, name, node, engines)
        choreo = {"reads": {source: rule.mode.name for source, rule in agent.rules.items()}}
        return {"runnable": agent, "metadata": {**(bound.nodes[name].metadata or {}), "choreo": choreo}}
    signing = partial(sign, node=name, persona=bound.personas.get(name))
    signing = partial(require_silent, node=name) if name in bound.table.silent else signing
    graphs = find_runnable(node, CompiledStateGraph)  # the nodes of such a graph are observed one by one
    holds_agents = any(isinstance(g.builder, DeclaringGraph) or any(agents_of(g.builder)) for g in graphs)
    return {"runnable": placed_node(node, name, signing, holds_agents=holds_agents)}


def require_names(graph: DeclaringGraph) -> None:
    """Raise `VisibilityError` if a declaration names no node, private context or persona of an agent."""
    chart = chart_of(graph)
    contexts = [context.name for context in chart.contexts]
    # Whether an agent thinks may depend on its model, and this chart has no engine yet. So a policy may name thoughts
    # of any agent.
    thoughts = {f"{name}.thoughts" for name, _ in agents_among(graph.nodes)}
    contexts += thoughts & graph.policy.confidential.keys()
    graph.table.require_nodes(graph.nodes)
    speakers = {agent.persona or name for name, agent in agents_among(graph.nodes)}
    for name, persona in graph.personas.items():
        if persona not in speakers:
            raise VisibilityError(
                f"the persona {persona!r} of the function {name!r} is not one of the graph's agents: "
                f"{', '.join(sorted(speakers))}"
            )
    systems, confidential = contexts_of(graph.nodes)
    graph.table.require_contexts([*systems, *confidential])
    graph.policy.require_names(contexts, {node.persona for node in chart.nodes})


def contexts_of(nodes: Mapping[str, Any]) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return the private contexts that a scope can name because the graph's own agents have their text.

    Returns:
        System prompts by the name of the context, and the nodes whose messages are confidential.
    """
    systems: dict[str, dict[str, None]] = {}
    for name, agent in agents_among(nodes):
        if isinstance(agent.system, str):
            systems.setdefault(f"{agent.persona or name}.system", {})[agent.system] = None
    confidential = frozenset(name for name, agent in agents_among(nodes) if agent.confidential)
    return {context: [*texts] for context, texts in systems.items()}, confidential


def bound_agent(graph: DeclaringGraph, name: str, agent: Agent, engines: Engines) -> Agent:
    """Return an agent bound to an engine, its visibility rules and the checks of its views at call time.

    Args:
        graph: The graph, with its declarations as they will hold.
        name: The agent's node.
        agent: The agent.
        engines: The graph's engines; an agent may have its own.

    Raises:
        InvalidRequestError: The agent has no engine, or names none of the graph's; its model cannot be constrained to
            its output format; or it writes a channel that the state does not have.
    """
    chart, engine = graph.declared, engines.of(agent)
    if engine is None:
        raise InvalidRequestError(
            f"agent {name!r} has no engine: use compile(engine=Engine.load(...)), or pass the agent one"
        )
    _require_served(name, agent, engine.model, graph.channels)
    sources, positions = graph.table.reads(name, graph.nodes), agent.positions or graph.positions
    hidden = [context for context in chart.guarded if name not in context.owners]
    forbidden = {
        channel: frozenset(context.name for context in hidden if chart.forbids(context, agent.persona or name, channel))
        for channel in CHANNELS
    }
    guard = Guard(private_in(sources), forbidden, graph.policy.on_violation, chart)
    undeclared, contexts = graph.table.undeclared(name, graph.nodes), contexts_of(graph.nodes)
    strict, by_tenant = graph.served["strict"], graph.resolver is not None
    rules = ReaderRules(
        sources, undeclared, graph.system, positions, *contexts, guard, strict=strict, by_tenant=by_tenant, node=name
    )
    bound = agent.bound(engine, rules)
    imported_by(bound, bound.engine)  # raises if its prompt does not fit the engine's model
    return bound


def _require_served(node: str, agent: Agent, model: LoadedModel, channels: Iterable[str]) -> None:
    """Raise unless a model can be constrained to an agent's response format and calls, and its channel exists.

    Raises:
        GrammarError: The format cannot be compiled for this model.
        InvalidRequestError: The model's tokens cannot be constrained, or the graph's state lacks the channel.
    """
    if agent.output_key is not None and agent.output_key not in channels:
        available = ", ".join(name for name in channels if name not in OWN_CHANNELS)
        raise InvalidRequestError(
            f"node {node!r} writes {agent.output_key!r}, but the graph's state has "
            f"{available or 'no channels of its own'}: add it to the state's schema"
        )
    constraints, (_, required) = CompiledConstraints(model), required_tools(agent.tools, agent.tool_choice)
    if agent.response_format is not None:
        constraints.of(agent.response_format.grammar, agent.tools)
    if required:
        constraints.of(None, agent.tools, required)


def require_by_tenant(graph: DeclaringGraph) -> None:
    """Raise `InvalidRequestError` unless all agents of a graph serve each run for its tenant, subgraphs included."""
    for agent in agents_of(graph):
        if not agent.reader_rules().by_tenant:
            raise InvalidRequestError(
                f"agent {agent.name!r} is in a subgraph that serves one tenant: compile that with tenant=..., too"
            )
    for node, _ in agents_among(graph.nodes):
        if is_cached(graph, node):
            raise InvalidRequestError(
                f"the cache of agent {node!r} is shared by all runs: leave cache_policy out, or compile for each tenant"
            )


def agents_among(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Agent]]:
    """Yield the agents among nodes, by name."""
    return ((name, spec.runnable) for name, spec in nodes.items() if isinstance(spec.runnable, Agent))
