"""Reads a graph into a chart: its nodes, those of its subgraphs, and what no proof covers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from langchain_core.runnables import Runnable, RunnableParallel, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.engine import Engine
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.audit.policy import Policy
from choreo_agents.graph.turn.imported_prompt import confidential_modules, has_own_words
from choreo_agents.graph.turn.thoughts import thinks
from choreo_agents.graph.visibility import START_SOURCE, Rule, with_input

Reads = Callable[[str, Agent], Mapping[str, Rule]]
"""The rules by which a node reads, by its name and its agent."""


def chart_of(builder: StateGraph[Any, Any, Any, Any], prefix: str = "", engine: Engine | None = None) -> Chart:
    """The chart of a graph, with all that its subgraphs hold.

    Args:
        builder: The graph, compiled or not.
        prefix: The nodes that it stands in: `team|`.
        engine: Serves the agents that have none yet.
    """
    reads: Reads = getattr(builder, "reads_of", _own_reads)
    nodes: list[ChartNode] = []
    outside: list[str] = []
    policies: list[tuple[str, Policy]] = []
    for name, spec in builder.nodes.items():
        path = prefix + name
        inner = next(found(spec.runnable, CompiledStateGraph), None)
        agent = next(found(spec.runnable, Agent), None)
        if inner is not None:
            chart = chart_of(inner.builder, f"{path}|", engine)
            nodes += chart.nodes
            outside += chart.outside
            policies += chart.policies
        elif agent is not None:
            nodes.append(_agent_node(agent, name, prefix, reads(name, agent), engine))
            if callable(agent.prompt):
                outside.append(f"the prompt of {path!r}, which a function makes from the state")
            if callable(agent.choices):
                outside.append(f"the answers that {path!r} may give, which a function makes from the state")
        else:
            persona = prefix + getattr(builder, "personas", {}).get(name, name)
            nodes.append(ChartNode(path, persona=persona, is_function=True))
            outside.append(
                f"the function {path!r}: what it reads, calls, says in a person's name, and where it sends control"
            )
    for source, branches in builder.branches.items():
        outside += [f"the route that {route!r} takes after {prefix + source!r}" for route in branches]
    if builder.branches or any(node.is_function for node in nodes):
        here = {prefix + name for name in builder.nodes}
        nodes = [
            replace(node, may_be_sent=not node.is_function and node.name in here) if node.name in here else node
            for node in nodes
        ]
    own: Policy | None = getattr(builder, "policy", None)
    modules = {module for node in nodes for module in node.modules}
    policies += [] if own is None or not own.confidential else [(prefix, own.within(prefix, modules))]
    return Chart(tuple(nodes), tuple(outside), tuple(policies))


def _own_reads(name: str, agent: Agent) -> Mapping[str, Rule]:
    """In a stock `StateGraph` agents say themselves what they read."""
    return with_input(agent.rules)


def agents_of(builder: StateGraph[Any, Any, Any, Any]) -> Iterator[Agent]:
    """All agents of a graph, those of its subgraphs included."""
    for spec in builder.nodes.values():
        yield from found(spec.runnable, Agent)
        for inner in found(spec.runnable, CompiledStateGraph):
            yield from agents_of(inner.builder)


def _agent_node(agent: Agent, name: str, prefix: str, rules: Mapping[str, Rule], engine: Engine | None) -> ChartNode:
    told, served = agent.schema_prompt, agent.engine or engine
    return ChartNode(
        prefix + name,
        persona=prefix + (agent.persona or name),
        has_system=agent.system is not None or bool(agent.tools) or (told is not None and has_own_words(told)),
        has_prompt=agent.prompt is not None,
        confidential=agent.confidential,
        thinks=bool(agent.thinking) if served is None else thinks(agent, served.chat),
        calls=bool(agent.tools),
        recalls=served is not None and served.chat.thoughts is not None and served.chat.thoughts.kept,
        schema=None if told is None else told.schema.name,
        modules=() if told is None else confidential_modules(told),
        rules={
            source if source == START_SOURCE else prefix + source: _placed(rule, prefix)
            for source, rule in rules.items()
        },
    )


def _placed(rule: Rule, prefix: str) -> Rule:
    """A rule whose contexts are named by their paths."""
    return replace(rule, scope=tuple(prefix + name for name in rule.contexts)) if rule.contexts and prefix else rule


def found(runnable: Any, kind: type[Any]) -> Iterator[Any]:
    """What of a kind a node is, or has among the steps of a sequence."""
    if isinstance(runnable, kind):
        yield runnable
    elif isinstance(runnable, RunnableSequence):
        steps: list[Runnable[Any, Any]] = runnable.steps
        for step in steps:
            yield from found(step, kind)
    elif isinstance(runnable, RunnableBindingBase):
        yield from found(runnable.bound, kind)
    elif isinstance(runnable, RunnableWithFallbacks):
        for each in (runnable.runnable, *runnable.fallbacks):
            yield from found(each, kind)
    elif isinstance(runnable, RunnableParallel):
        for each in runnable.steps__.values():
            yield from found(each, kind)
