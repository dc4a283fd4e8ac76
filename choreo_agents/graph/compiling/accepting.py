"""What a graph takes for an agent's node, and for a state: wrappers and schemas, as far as they can be read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from langchain_core.runnables.base import RunnableBinding, RunnableBindingBase
from langchain_core.runnables.retry import RunnableRetry
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, RetryPolicy

from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.compiling.charting import agents_of, found
from choreo_agents.graph.langgraph_internals import merges_by
from choreo_agents.graph.state import merge_entries, merge_updates
from choreo_agents.graph.visibility import Rule


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
        if next(found(wrapped, Agent), None) is not None and isinstance(agent, RunnableBindingBase):
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


def require_ways(graph: StateGraph[Any, Any, Any, Any], declared: Iterable[tuple[str, str, Rule]]) -> None:
    """Raise `VisibilityError` if what agents say cannot come into a graph that is a node, or out of it, as declared.

    Args:
        graph: In which they stand.
        declared: How who sees whom in it.
    """
    nodes = graph.nodes.items()
    graphs = {name: inner.builder for name, spec in nodes for inner in found(spec.runnable, CompiledStateGraph)}
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
    if not any(isinstance(spec.runnable, Agent) for spec in graph.nodes.values()):
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
