"""A `StateGraph` whose edges say what each node may see."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.graph import Edge, Graph
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.inputs import sign
from choreo_agents.graph.state import ChoreoState
from choreo_agents.graph.visibility import History, Mode, Rule, VisibilityTable, rule_of

Self = TypeVar("Self", bound="ChoreoGraph")


class ChoreoGraph(StateGraph[Any, Any, Any, Any]):
    """A LangGraph `StateGraph` for agents that hand each other KV-cache handles.

    Args:
        state_schema: `ChoreoState`, or a TypedDict that extends it.
        system: The public root: a system prompt that every view starts with, encoded once.
        **options: As for `StateGraph`.
    """

    def __init__(self, state_schema: type[Any] = ChoreoState, *, system: str | None = None, **options: Any) -> None:
        super().__init__(state_schema, **options)
        self.system = system
        self._visibility = VisibilityTable()

    def add_node(self: Self, node: Any, action: Any = None, **options: Any) -> Self:
        """Add a node, as `StateGraph.add_node` does. An `Agent` brings its name and its `reads`.

        Raises:
            InvalidRequestError: An agent is wrapped, by `with_retry` or `with_config`, say.
        """
        agent = node if action is None else action
        if isinstance(agent, RunnableBindingBase) and isinstance(agent.bound, Agent):
            raise InvalidRequestError(
                f"agent {agent.bound.name!r} is wrapped, so that its declarations cannot be read: add the agent "
                "itself, and give retries, caching and timeouts to add_node"
            )
        super().add_node(node, action, **options)
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
    ) -> Self:
        """Add an edge and say what the node at its end sees of the node at its start.

        Args:
            start_key: One node, or several that must all be done.
            end_key: The reader.
            visibility: `"shared"` (the default), `"private"` or `"reencoded"`; a `Rule`; or a dict from source to
                either, which may name other nodes than those at the start.
            history: `"all"` messages (the default), those of the `"last"` superstep, or of the last k.

        Raises:
            VisibilityError: No such mode, END has no view, or the pair was declared otherwise before.
        """
        explicit = visibility is not None or history is not None
        if end_key == END and explicit:
            raise VisibilityError("END sees nothing: leave visibility and history out")
        named = dict(visibility) if isinstance(visibility, Mapping) else {}
        rules = {source: rule_of(spelling, history) for source, spelling in named.items()}
        default = rule_of(None if isinstance(visibility, Mapping) else visibility, history)
        super().add_edge(start_key, end_key)
        if end_key != END:
            for source in [start_key] if isinstance(start_key, str) else start_key:
                if source not in rules and source != end_key:
                    self._visibility.declare(source, end_key, default, explicit=explicit and not named)
            for source, rule in rules.items():
                self._visibility.declare(source, end_key, rule)
        return self

    def add_conditional_edges(self: Self, source: str, path: Any, path_map: Any = None) -> Self:
        """As `StateGraph.add_conditional_edges`; targets that are known beforehand see the source, as over an edge."""
        super().add_conditional_edges(source, path, path_map)
        for branch in self.branches[source].values():
            for target in (branch.ends or {}).values():
                if target not in (END, source):
                    self._visibility.declare(source, target, Rule(), explicit=False)
        return self

    def share(self: Self, source: str, reader: str, mode: Mode = "shared", *, history: History = "all") -> Self:
        """Let `reader` see `source` without any control flow between them."""
        self._visibility.declare(source, reader, Rule(mode, history))
        return self

    def visibility_table(self) -> dict[str, dict[str, Rule]]:
        """Every declaration, by reader and source, as plain data."""
        return {reader: dict(rules) for reader, rules in self._visibility.rules.items()}

    def compile(self, checkpointer: Any = None, *, engine: Engine | None = None, **options: Any) -> CompiledChoreoGraph:
        """Compile as `StateGraph.compile` does, bind every agent to `engine` and to what it may read.

        The graph itself is not changed: it can be compiled again with another engine.

        Raises:
            VisibilityError: A declaration names no node.
            InvalidRequestError: An agent has no engine.
        """
        self._visibility.require_nodes(self.nodes)
        bound = copy.copy(self)
        bound._visibility = copy.deepcopy(self._visibility)
        bound.nodes = {}
        for name, spec in self.nodes.items():
            reads = self._visibility.reads(name)
            choreo = {"reads": {source: rule.mode for source, rule in reads.items()}}
            agent: Any = spec.runnable
            if isinstance(agent, Agent):
                if engine is None and agent.engine is None:
                    raise InvalidRequestError(
                        f"agent {name!r} has no engine: compile(engine=Engine.load(...)), or give the agent one"
                    )
                metadata = {**(spec.metadata or {}), "choreo": choreo}
                agent = agent.bound(engine, reads, self.system)
                bound.nodes[name] = replace(spec, runnable=agent, metadata=metadata)
            else:
                bound.nodes[name] = replace(spec, runnable=agent | RunnableLambda(sign, name=f"sign {name}"))
        compiled = super(ChoreoGraph, bound).compile(checkpointer, **options)
        # StateGraph.compile names its result's class; only the drawing differs, so the finished object is relabelled.
        compiled.__class__ = CompiledChoreoGraph
        assert isinstance(compiled, CompiledChoreoGraph)
        return compiled


class CompiledChoreoGraph(CompiledStateGraph[Any, Any, Any, Any]):
    """A `CompiledStateGraph` whose drawing shows visibilities as edge labels."""

    def get_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return self._labelled(super().get_graph(config, xray=xray))

    async def aget_graph(self, config: RunnableConfig | None = None, *, xray: int | bool = False) -> Graph:
        return self._labelled(await super().aget_graph(config, xray=xray))

    def _labelled(self, graph: Graph) -> Graph:
        assert isinstance(self.builder, ChoreoGraph)
        table = self.builder.visibility_table()
        drawn = {(edge.source, edge.target) for edge in graph.edges}
        edges = [self._label(edge, table) for edge in graph.edges]
        for reader, rules in table.items():
            for source, rule in rules.items():
                if (source, reader) not in drawn and {source, reader} <= graph.nodes.keys():
                    edges.append(Edge(source, reader, data=_words(rule), conditional=True))
        graph.edges = edges
        return graph

    @staticmethod
    def _label(edge: Edge, table: Mapping[str, Mapping[str, Rule]]) -> Edge:
        rule = table.get(edge.target, {}).get(edge.source)
        return edge if rule is None or edge.data else edge._replace(data=_words(rule))


def _words(rule: Rule) -> str:
    """A rule as an edge label."""
    if rule.history == "all" or rule.mode == "private":
        return rule.mode
    return f"{rule.mode}, last" if rule.history == "last" else f"{rule.mode}, last {rule.history}"


__all__ = ["START", "ChoreoGraph", "CompiledChoreoGraph"]
