"""Copies a compiled graph with other prompts or nodes, for replays and comparisons."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent, Worker, instance_prompt
from choreo_agents.graph.choreo_graph import ChoreoGraph
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.langgraph_internals import stops_of
from choreo_agents.graph.nesting import observed, wrapped


class GraphCopy:
    """Copier for one graph, over the same engines.

    Args:
        texts: New prompts by name: `alice.system`, `alice.prompt`.
        nodes: New nodes by path.
    """

    def __init__(self, texts: Mapping[str, str] | None = None, nodes: Mapping[str, Any] | None = None) -> None:
        self._texts, self._nodes = texts or {}, nodes or {}
        self._used: set[str] = set()

    def compiled(self, app: CompiledChoreoGraph, *, kept: bool) -> CompiledChoreoGraph:
        """Return the copy; `kept`: with an in-memory checkpointer of its own.

        Raises:
            InvalidRequestError: A name is that of no node, agent or persona.
        """
        copied = self._copy_graph(app, InMemorySaver() if kept else None, "")
        for name in [*self._texts, *self._nodes]:
            if name not in self._used:
                raise InvalidRequestError(f"the graph has nothing named {name!r} that can be replaced or set")
        copied.config = app.config
        return copied

    def _copy_graph(self, app: CompiledChoreoGraph, saver: Any, prefix: str) -> CompiledChoreoGraph:
        builder: Any = app.builder
        graph: ChoreoGraph = builder.origin
        copied = graph.with_policy(graph.policy)
        nodes = graph.nodes.items()
        copied.nodes = {name: replace(spec, runnable=self._copy(prefix + name, spec.runnable)) for name, spec in nodes}
        return copied.compile(saver, **builder.served, lineage=False, **stops_of(app))

    def _copy_stock(self, graph: Any, prefix: str) -> Any:
        """Return a copy of a stock graph whose functions are observed as a `ChoreoGraph`'s are."""
        copied, nodes = copy.copy(graph.builder), {}
        for name, spec in copied.nodes.items():
            node = self._copy(prefix + name, spec.runnable)
            listened = isinstance(node, Agent | CompiledStateGraph)
            nodes[name] = replace(spec, runnable=node if listened else wrapped(node, observed))
        copied.nodes = nodes
        compiled = copied.compile(graph.checkpointer, **stops_of(graph))
        compiled.config = graph.config
        return compiled

    def _copy(self, path: str, node: Any) -> Any:
        if path in self._nodes:
            self._used.add(path)
            return StateGraph(MessagesState).add_node("node", self._nodes[path]).nodes["node"].runnable
        if isinstance(node, CompiledChoreoGraph):
            return self._copy_graph(node, node.checkpointer, f"{path}|")
        if isinstance(node, CompiledStateGraph):
            return self._copy_stock(node, f"{path}|")
        return self._copy_agent(path, node) if isinstance(node, Agent) else node

    def _copy_agent(self, path: str, agent: Agent) -> Agent:
        home = path.rpartition("|")[0]
        names = [path, *([f"{home}|{agent.persona}" if home else agent.persona] if agent.persona else [])]
        for name in names:
            if (text := self._texts.get(f"{name}.system")) is not None:
                agent = agent.with_system(text)
            if (text := self._texts.get(f"{name}.prompt")) is not None:
                if agent.schema_prompt is not None:
                    raise InvalidRequestError(f"agent {agent.name!r} has a schema prompt, which cannot be set")
                agent = copy.copy(agent)
                agent.prompt = instance_prompt(agent.name, text) if isinstance(agent, Worker) else text
            self._used |= {f"{name}.system", f"{name}.prompt"}
        return agent
