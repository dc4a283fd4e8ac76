"""A copy of a graph that keeps its threads for itself, with other nodes, and agents that are told otherwise."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.choreo_graph import ChoreoGraph
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.langgraph_internals import stops_of
from choreo_agents.graph.nesting import around
from choreo_agents.graph.worker import Worker, instance_prompt


class GraphCopy:
    """Of one graph, over the same engines.

    Args:
        told: What its agents are told otherwise, as in `alice.system` and `alice.prompt`.
        nodes: What stands in the place of nodes, by name, behind the subgraphs that they stand in.
    """

    def __init__(self, told: Mapping[str, str] | None = None, nodes: Mapping[str, Any] | None = None) -> None:
        self._told, self._nodes = told or {}, nodes or {}
        self._used: set[str] = set()

    def compiled(self, app: CompiledChoreoGraph, *, kept: bool) -> CompiledChoreoGraph:
        """The copy; `kept`: with a memory of its own for its threads.

        Raises:
            InvalidRequestError: A name is that of no node, agent or persona.
        """
        made = self._compiled(app, InMemorySaver() if kept else None, "")
        for name in [*self._told, *self._nodes]:
            if name not in self._used:
                raise InvalidRequestError(f"the graph has nothing of that name that can be replaced or set: {name!r}")
        made.config = app.config
        return made

    def _compiled(self, app: CompiledChoreoGraph, saver: Any, prefix: str) -> CompiledChoreoGraph:
        builder: Any = app.builder
        graph: ChoreoGraph = builder.origin
        copied = graph.with_policy(graph.policy)
        copied.nodes = {
            name: replace(spec, runnable=self._node(prefix + name, spec.runnable)) for name, spec in graph.nodes.items()
        }
        return copied.compile(saver, **builder.served, lineage=False, **stops_of(app))

    def _stock(self, graph: Any, prefix: str) -> Any:
        """A graph of LangGraph's own, whose functions are listened to as ours are."""
        copied, nodes = copy.copy(graph.builder), {}
        for name, spec in copied.nodes.items():
            node = self._node(prefix + name, spec.runnable)
            listened = isinstance(node, Agent | CompiledStateGraph)
            nodes[name] = replace(spec, runnable=node if listened else around(node))
        copied.nodes = nodes
        made = copied.compile(graph.checkpointer, **stops_of(graph))
        made.config = graph.config
        return made

    def _node(self, path: str, node: Any) -> Any:
        if path in self._nodes:
            self._used.add(path)
            return StateGraph(MessagesState).add_node("node", self._nodes[path]).nodes["node"].runnable
        if isinstance(node, CompiledChoreoGraph):
            return self._compiled(node, node.checkpointer, f"{path}|")
        if isinstance(node, CompiledStateGraph):
            return self._stock(node, f"{path}|")
        return self._agent(path, node) if isinstance(node, Agent) else node

    def _agent(self, path: str, agent: Agent) -> Agent:
        home = path.rpartition("|")[0]
        names = [path, *([f"{home}|{agent.persona}" if home else agent.persona] if agent.persona else [])]
        for name in names:
            if (text := self._told.get(f"{name}.system")) is not None:
                agent = agent.with_system(text)
            if (text := self._told.get(f"{name}.prompt")) is not None:
                if agent.schema_prompt is not None:
                    raise InvalidRequestError(f"agent {agent.name!r} has a prompt of a schema, which cannot be set")
                agent = copy.copy(agent)
                agent.prompt = instance_prompt(agent.name, text) if isinstance(agent, Worker) else text
            self._used |= {f"{name}.system", f"{name}.prompt"}
        return agent
