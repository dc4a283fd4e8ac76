"""Checks the nodes and the state of a graph, and binds each agent to its engine and to the rules for its view."""

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
from choreo_agents.graph.provenance import forward_sends
from choreo_agents.graph.state import merge_entries, merge_updates
from choreo_agents.graph.view.reader_rules import ReaderRules
from choreo_agents.graph.visibility import VisibilityRule, private_in

Contexts = tuple[Mapping[str, Sequence[str]], frozenset[str]]
"""Private contexts: system prompts by name, and the nodes whose messages are confidential."""


# Checks of nodes and state


def unwrap(node: Any) -> tuple[Any, RetryPolicy | None]:
    """Return an agent without its `with_retry` and `with_config` wrappers, and its retry policy. Tags and metadata are
    kept.

    Anything else is returned as it is.

    Raises:
        InvalidRequestError: An agent is wrapped in another way, which would hide its declarations.
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
        if extra := sorted(config.keys() - {"tags", "metadata", "run_name", "recursion_limit"}):
            raise InvalidRequestError(f"agent {agent.name!r} is wrapped with {extra[0]!r}, which a run says")
        agent.tags = [*agent.tags, *(config.get("tags") or ())]
        agent.metadata = {**agent.metadata, **(config.get("metadata") or {})}
    return agent, policy


_WAITS = {"initial": "initial_interval", "max": "max_interval", "exp_base": "backoff_factor"}
"""LangGraph's names for the waiting options of a runnable's retries."""


def _policy_of(retry: Any) -> RetryPolicy:
    kinds, waits = retry.retry_exception_types, retry.exponential_jitter_params or {}
    return RetryPolicy(
        **{option: waits[key] for key, option in _WAITS.items() if key in waits},
        max_attempts=retry.max_attempt_number,
        jitter=retry.wait_exponential_jitter,
        retry_on=kinds if callable(kinds) else tuple(kinds),
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


def require_schemas(graph: StateGraph[Any, Any, Any, Any], declared: Iterable[tuple[str, str, VisibilityRule]]) -> None:
    """Raise `VisibilityError` if a subgraph's input or output schema has no `messages`, so that a declared rule cannot
    hold.

    Args:
        graph: The graph around.
        declared: Its declarations, as (source, reader, rule).
    """
    nodes = graph.nodes.items()
    graphs = {name: inner.builder for name, spec in nodes for inner in find_runnable(spec.runnable, CompiledStateGraph)}
    for source, reader, rule in declared:
        for node, end in ((source, "output_schema"), (reader, "input_schema")):
            builder: Any = graphs[node] if rule.mode.shows and node in graphs else None
            schema = getattr(builder, end) if builder is not None and any(agents_of(builder)) else None
            if schema is not None and "messages" not in builder.schemas[schema]:
                raise VisibilityError(
                    f"the visibility {source!r} to {reader!r} cannot be {rule.words()!r}: {schema.__name__}, the {end} "
                    f"of {node!r}, has no 'messages': derive it from ChoreoState"
                )


def require_channels(graph: StateGraph[Any, Any, Any, Any]) -> None:
    """Raise `InvalidRequestError` if the state has no channels for the agents' messages and handles."""
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


# Binding agents


def contexts_of(nodes: Mapping[str, Any]) -> Contexts:
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


def require_personas(personas: Mapping[str, str], nodes: Mapping[str, Any]) -> None:
    """Raise `VisibilityError` if a function is declared to speak for a persona that no agent of the graph has."""
    speakers = {agent.persona or name for name, agent in agents_among(nodes)}
    for name, persona in personas.items():
        if persona not in speakers:
            raise VisibilityError(
                f"the function {name!r} is to speak for {persona!r}, which is no persona of the graph's agents: "
                f"{', '.join(sorted(speakers))}"
            )


def bind_agent(
    graph: DeclaringGraph,
    name: str,
    spec: Any,
    engines: Engines,
    contexts: Contexts,
) -> Any:
    """Return an agent's node for LangGraph, bound to an engine, its visibility rules and the checks of its views at
    call time.

    Args:
        graph: The graph, with its declarations as they will hold.
        name: The agent's node.
        spec: The node as the graph has it.
        engines: The graph's engines; an agent may have its own.
        contexts: The private contexts of all nodes, from `contexts_of`.

    Raises:
        InvalidRequestError: The agent has no engine, or names none of the graph's; its model cannot be constrained to
            its output format; or it writes a channel that the state does not have.
    """
    agent, chart = spec.runnable, graph.declared.chart
    engine = engines.of(agent)
    if engine is None:
        raise InvalidRequestError(
            f"agent {name!r} has no engine: compile(engine=Engine.load(...)), or give the agent one"
        )
    require_served(name, agent, engine.model, graph.channels)
    sources = graph.table.reads(name, graph.nodes)
    hidden = [context for context in chart.guarded if name not in context.owners]
    forbidden = {
        channel: frozenset(context.name for context in hidden if chart.forbids(context, agent.persona or name, channel))
        for channel in CHANNELS
    }
    undeclared, positions = graph.table.undeclared(name, graph.nodes), agent.positions or graph.positions
    guard = Guard(private_in(sources), forbidden, graph.policy.on_violation, graph.declared)
    strict, by_tenant = graph.served["strict"], graph.resolver is not None
    rules = ReaderRules(
        sources, undeclared, graph.system, positions, *contexts, guard, strict=strict, by_tenant=by_tenant, node=name
    )
    choreo = {"reads": {source: rule.mode.name for source, rule in sources.items()}}
    return replace(spec, runnable=agent.bound(engine, rules), metadata={**(spec.metadata or {}), "choreo": choreo})


def require_by_tenant(graph: DeclaringGraph) -> None:
    """Raise `InvalidRequestError` unless all agents of a graph serve each run for its tenant, subgraphs included."""
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
    """Let the routes of a graph send messages on with the metadata that they have in its state."""

    def bound(path: Any) -> AroundNode:
        def run(state: Any, config: RunnableConfig) -> Any:
            return forward_sends(path.invoke(state, config), config, fresh=True)

        async def arun(state: Any, config: RunnableConfig) -> Any:
            return forward_sends(await path.ainvoke(state, config), config, fresh=True)

        return AroundNode(path, run, arun)

    for routes in branches.values():
        routes |= {name: route._replace(path=bound(route.path)) for name, route in routes.items()}


def agents_among(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Agent]]:
    """Yield the agents among nodes, by name."""
    return ((name, spec.runnable) for name, spec in nodes.items() if isinstance(spec.runnable, Agent))
