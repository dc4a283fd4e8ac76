"""What a graph tells each of its agents when it is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit import Declared, Policy
from choreo_agents.graph.compiling.promises import guard_of
from choreo_agents.graph.turn.reader_rules import ReaderRules
from choreo_agents.graph.visibility import Positions, Rule


class DeclaringGraph(Protocol):
    """A graph with its declarations."""

    system: str | None
    policy: Policy
    positions: Positions

    def reads_of(self, name: str, agent: Agent) -> Mapping[str, Rule]: ...


def named_contexts(nodes: Mapping[str, Any]) -> set[str]:
    """The private contexts that a scope can name: those whose text the graph's own agents have."""
    systems = {f"{agent.persona or name}.system" for name, agent in _agents(nodes) if agent.system is not None}
    return systems | {name for name, agent in _agents(nodes) if agent.confidential}


def require_personas(personas: Mapping[str, str], nodes: Mapping[str, Any]) -> None:
    """Raise `VisibilityError` if a function is declared to speak for somebody who does not speak in the graph."""
    known = {agent.persona or name for name, agent in _agents(nodes)}
    for name, persona in personas.items():
        if persona not in known:
            raise VisibilityError(
                f"the function {name!r} is to speak for {persona!r}, which is no persona of the graph's agents: "
                f"{', '.join(sorted(known))}"
            )


def reader_rules(
    graph: DeclaringGraph, nodes: Mapping[str, Any], name: str, agent: Agent, declared: Declared
) -> ReaderRules:
    """All that an agent is told about what it may see, and what to watch.

    Args:
        graph: Its declarations, as they will hold.
        nodes: All nodes of the graph.
        name: The agent's node.
        agent: Who reads.
        declared: The graph as it will run.
    """
    sources = graph.reads_of(name, agent)
    systems: dict[str, list[str]] = {}
    for other, each in _agents(nodes):
        if each.system is not None:
            texts = systems.setdefault(f"{each.persona or other}.system", [])
            texts += [each.system] if each.system not in texts else []
    return ReaderRules(
        sources,
        graph.system,
        agent.positions or graph.positions,
        systems,
        frozenset(other for other, each in _agents(nodes) if each.confidential),
        guard_of(name, agent.persona or name, sources, declared, graph.policy.on_violation),
    )


def _agents(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Agent]]:
    return ((name, spec.runnable) for name, spec in nodes.items() if isinstance(spec.runnable, Agent))
