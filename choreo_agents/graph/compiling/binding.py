"""What a graph takes for an agent's node, and for a state; and what it tells each of its agents when it is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase
from langchain_core.runnables.retry import RunnableRetry
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, RetryPolicy

from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.audit.static import CHANNELS
from choreo_agents.graph.compiling.charting import DeclaringGraph, agents_of, find_runnable
from choreo_agents.graph.engines import Engines
from choreo_agents.graph.langgraph_internals import AroundNode, is_cached, merges_by
from choreo_agents.graph.outputs import require_served
from choreo_agents.graph.provenance import handed_on
from choreo_agents.graph.state import merge_entries, merge_updates
from choreo_agents.graph.view.reader_rules import ReaderRules
from choreo_agents.graph.visibility import VisibilityRule, hidden_sources

Contexts = tuple[Mapping[str, Sequence[str]], frozenset[str]]
"""Private contexts: system prompts by name, and the nodes whose messages are confidential."""


# What it takes


def unwrapped(node: Any) -> tuple[Any, RetryPolicy | None]:
    """An agent out of `with_retry` and `with_config`, with the tags and metadata that these give; how it is retried.

    Anything else stays as it is.

    Raises:
        InvalidRequestError: An agent is wrapped otherwise, so that its declarations would bind nobody.
    """
    policy: RetryPolicy | None = None
    wrapped, agent = node, node
    configs: list[Any] = []
    while isinstance(agent, RunnableBindingBase) and not agent.config_factories:
        if isinstance(agent, RunnableRetry):
            policy = policy or _policy_of(agent)
        elif type(agent) is not RunnableBinding or agent.kwargs:
            break
        configs.append(agent.config)
        agent = agent.bound
    if not isinstance(agent, Agent):
        if next(find_runnable(wrapped, Agent), None) is not None and isinstance(agent, RunnableBindingBase):
            raise InvalidRequestError(
                "an agent is wrapped, so that its declarations cannot be read: add the agent itself, and give caching "
                "and timeouts to add_node; with_retry and with_config(tags=..., metadata=...) are taken over"
            )
        return wrapped, None
    if not configs:
        return agent, policy
    agent = copy.copy(agent)
    for config in reversed(configs):
        if others := sorted(config.keys() - {"tags", "metadata", "run_name", "recursion_limit"}):
            raise InvalidRequestError(f"agent {agent.name!r} is wrapped with {others[0]!r}, which a run says")
        agent.tags = [*agent.tags, *(config.get("tags") or ())]
        agent.metadata = {**agent.metadata, **(config.get("metadata") or {})}
    return agent, policy


_WAITS = {"initial": "initial_interval", "max": "max_interval", "exp_base": "backoff_factor"}
"""What a runnable's retries are told about waiting, as LangGraph calls it."""


def _policy_of(retry: Any) -> RetryPolicy:
    kinds, waits = retry.retry_exception_types, retry.exponential_jitter_params or {}
    return RetryPolicy(
        **{ours: waits[theirs] for theirs, ours in _WAITS.items() if theirs in waits},
        max_attempts=retry.max_attempt_number,
        jitter=retry.wait_exponential_jitter,
        retry_on=kinds if callable(kinds) else tuple(kinds),
    )


def destinations_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Where a function's annotation says that it sends control: `-> Command[Literal["pro", "con"]]`."""
    try:
        returned = get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None
    for kind in (returned, *get_args(returned)):
        targets = get_args(kind)[0] if get_origin(kind) is Command else None
        if get_origin(targets) is Literal:
            return tuple(map(str, get_args(targets)))
    return None


def require_ways(graph: StateGraph[Any, Any, Any, Any], declared: Iterable[tuple[str, str, VisibilityRule]]) -> None:
    """Raise `VisibilityError` if what agents say cannot come into a graph that is a node, or out of it, as declared.

    Args:
        graph: In which they stand.
        declared: How who sees whom in it.
    """
    nodes = graph.nodes.items()
    graphs = {name: inner.builder for name, spec in nodes for inner in find_runnable(spec.runnable, CompiledStateGraph)}
    for source, reader, rule in declared:
        for node, way in ((source, "output_schema"), (reader, "input_schema")):
            builder: Any = graphs[node] if rule.mode.shows and node in graphs else None
            schema = getattr(builder, way) if builder is not None and any(agents_of(builder)) else None
            if schema is not None and "messages" not in builder.schemas[schema]:
                raise VisibilityError(
                    f"the visibility {source!r} to {reader!r} cannot be {rule.words()!r}: {schema.__name__}, the {way} "
                    f"of {node!r}, has no 'messages': derive it from ChoreoState"
                )


def require_channels(graph: StateGraph[Any, Any, Any, Any]) -> None:
    """Raise `InvalidRequestError` if agents of a graph could not write what they say into its state."""
    if not any(agents_among(graph.nodes)):
        return
    missing = [name for name in ("handles", "messages") if name not in graph.channels]
    handles, schema = graph.channels.get("handles"), graph.state_schema.__name__
    if missing:
        raise InvalidRequestError(
            f"the state {schema} has no {' and no '.join(map(repr, missing))}, in which agents say what they say: "
            f"derive it from ChoreoState, as class {schema}(ChoreoState)"
        )
    if not merges_by(handles, merge_entries, merge_updates):
        raise InvalidRequestError(
            f"the handles of the state {schema} would not be merged: derive it from ChoreoState, and leave that "
            "channel as it is"
        )


# What it tells


def contexts_of(nodes: Mapping[str, Any]) -> Contexts:
    """The private contexts that a scope can name, since the graph's own agents have their text: system prompts, by the
    name of the context, and the nodes whose messages are confidential."""
    systems: dict[str, dict[str, None]] = {}
    for name, agent in agents_among(nodes):
        if isinstance(agent.system, str):
            systems.setdefault(f"{agent.persona or name}.system", {})[agent.system] = None
    confidential = frozenset(name for name, agent in agents_among(nodes) if agent.confidential)
    return {context: [*texts] for context, texts in systems.items()}, confidential


def require_personas(personas: Mapping[str, str], nodes: Mapping[str, Any]) -> None:
    """Raise `VisibilityError` if a function is declared to speak for somebody who does not speak in the graph."""
    known = {agent.persona or name for name, agent in agents_among(nodes)}
    for name, persona in personas.items():
        if persona not in known:
            raise VisibilityError(
                f"the function {name!r} is to speak for {persona!r}, which is no persona of the graph's agents: "
                f"{', '.join(sorted(known))}"
            )


def bound_agent(
    graph: DeclaringGraph,
    name: str,
    spec: Any,
    engines: Engines,
    contexts: Contexts,
) -> Any:
    """What LangGraph is told of an agent's node: it is bound to an engine, and to all that it is told about what it may
    see, and what its views are checked for at call time.

    Args:
        graph: Its declarations, as they will hold.
        name: The agent's node.
        spec: That, as the graph has it.
        engines: The graph's; an agent may have its own.
        contexts: Of all its nodes, as `contexts_of` gives them.

    Raises:
        InvalidRequestError: It has no engine, or names none of the graph's; its model cannot be led to its output; it
            writes a channel that the graph's state has not.
    """
    agent, chart = spec.runnable, graph.declared.chart
    engine = engines.of(agent)
    if engine is None:
        raise InvalidRequestError(
            f"agent {name!r} has no engine: compile(engine=Engine.load(...)), or give the agent one"
        )
    require_served(name, agent, engine.model, graph.channels)
    sources = graph.table.reads(name, graph.nodes)
    others = [context for context in chart.guarded if name not in context.owners]
    forbidden = {
        channel: frozenset(each.name for each in others if chart.forbids(each, agent.persona or name, channel))
        for channel in CHANNELS
    }
    rules = ReaderRules(
        sources,
        graph.table.undeclared(name, graph.nodes),
        graph.system,
        agent.positions or graph.positions,
        *contexts,
        Guard(hidden_sources(sources), forbidden, graph.policy.on_violation, graph.declared),
        strict=graph.served["strict"],
        by_tenant=graph.resolver is not None,
        node=name,
    )
    choreo = {"reads": {source: rule.mode.name for source, rule in sources.items()}}
    return replace(spec, runnable=agent.bound(engine, rules), metadata={**(spec.metadata or {}), "choreo": choreo})


def require_by_tenant(graph: DeclaringGraph) -> None:
    """Raise `InvalidRequestError` unless a graph serves each run for its tenant, wherever an agent speaks."""
    for agent in agents_of(graph):
        if not agent.reader_rules().by_tenant:
            raise InvalidRequestError(
                f"agent {agent.name!r} stands in a subgraph that serves one tenant: compile that with tenant=..., too"
            )
    for node, _ in agents_among(graph.nodes):
        if is_cached(graph, node):
            raise InvalidRequestError(
                f"what agent {node!r} says is cached for all runs: leave cache_policy out, or compile for each tenant"
            )


def bind_routes(branches: Mapping[str, dict[str, Any]]) -> None:
    """Let the routes of a graph send on what stands in its state under the notes that it has there."""

    def bound(path: Any) -> AroundNode:
        def run(given: Any, config: RunnableConfig) -> Any:
            return handed_on(path.invoke(given, config), config, fresh=True)

        async def arun(given: Any, config: RunnableConfig) -> Any:
            return handed_on(await path.ainvoke(given, config), config, fresh=True)

        return AroundNode(path, run, arun)

    for routes in branches.values():
        routes |= {name: route._replace(path=bound(route.path)) for name, route in routes.items()}


def agents_among(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Agent]]:
    """The agents among nodes, by name."""
    return ((name, spec.runnable) for name, spec in nodes.items() if isinstance(spec.runnable, Agent))
