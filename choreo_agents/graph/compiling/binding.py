"""What a graph tells each of its agents when it is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.audit.static import CHANNELS
from choreo_agents.graph.compiling.charting import DeclaringGraph
from choreo_agents.graph.engines import Engines
from choreo_agents.graph.langgraph_internals import AroundNode
from choreo_agents.graph.outputs import require_served
from choreo_agents.graph.provenance import handed_on
from choreo_agents.graph.view.reader_rules import ReaderRules
from choreo_agents.graph.visibility import hidden_sources


def contexts_of(nodes: Mapping[str, Any]) -> tuple[Mapping[str, Sequence[str]], frozenset[str]]:
    """The private contexts that a scope can name, since the graph's own agents have their text: system prompts, by the
    name of the context, and the nodes whose messages are confidential."""
    systems: dict[str, dict[str, None]] = {}
    for name, agent in _agents(nodes):
        if isinstance(agent.system, str):
            systems.setdefault(f"{agent.persona or name}.system", {})[agent.system] = None
    confidential = frozenset(name for name, agent in _agents(nodes) if agent.confidential)
    return {context: [*texts] for context, texts in systems.items()}, confidential


def require_personas(personas: Mapping[str, str], nodes: Mapping[str, Any]) -> None:
    """Raise `VisibilityError` if a function is declared to speak for somebody who does not speak in the graph."""
    known = {agent.persona or name for name, agent in _agents(nodes)}
    for name, persona in personas.items():
        if persona not in known:
            raise VisibilityError(
                f"the function {name!r} is to speak for {persona!r}, which is no persona of the graph's agents: "
                f"{', '.join(sorted(known))}"
            )


def with_system(nodes: Mapping[str, Any], node: str, text: str) -> dict[str, Any]:
    """The same nodes, but for another system prompt of one agent, or of all agents of a persona.

    Raises:
        VisibilityError: There is no such agent.
        InvalidRequestError: It has a prompt of a schema instead.
    """
    meant = {name: agent.with_system(text) for name, agent in _agents(nodes) if node in (name, agent.persona)}
    if not meant:
        raise VisibilityError(f"no agent or persona of the graph is named {node!r}: {', '.join(nodes)}")
    return {**nodes, **{name: replace(nodes[name], runnable=agent) for name, agent in meant.items()}}


def bound_agent(
    graph: DeclaringGraph,
    name: str,
    spec: Any,
    engines: Engines,
    contexts: tuple[Mapping[str, Sequence[str]], frozenset[str]],
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
        strict=graph.served[1],
        by_tenant=graph.resolver is not None,
        node=name,
    )
    choreo = {"reads": {source: rule.mode.name for source, rule in sources.items()}}
    return replace(spec, runnable=agent.bound(engine, rules), metadata={**(spec.metadata or {}), "choreo": choreo})


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


def _agents(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Agent]]:
    return ((name, spec.runnable) for name, spec in nodes.items() if isinstance(spec.runnable, Agent))
