"""A graph on engines of its own, with nothing encoded yet: where a recording is played."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.engine import Engine
from choreo_agents.engine.recording import RecordingHeader
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.choreo_graph import ChoreoGraph
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.compiling.charting import agents_of, found
from choreo_agents.graph.engines import EngineChoice
from choreo_agents.graph.langgraph_internals import stops_of
from choreo_agents.graph.sending import sent_instruction
from choreo_agents.graph.worker import Worker
from choreo_agents.models.weightless import WeightlessAdapter
from choreo_agents.runtime.timetable import Timetable


@dataclass(frozen=True)
class ToldOtherwise:
    """What agents are told in a fork, by node or persona, behind the subgraphs that they stand in."""

    systems: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)

    def require_used(self, used: set[str]) -> None:
        """Raise `InvalidRequestError` if a name is nobody's."""
        for what, names in (("system", self.systems), ("prompt", self.prompts)):
            for name in names:
                if f"{name}.{what}" not in used:
                    raise InvalidRequestError(f"no agent or persona of the graph is named {name!r}: {name}.{what}")


class Stage:
    """Used by one player at a time.

    Args:
        app: The graph. It and its engines stay as they are.
        header: Of the recording.
        timetable: Names the steps to be run; None: the engine runs what comes.
        told: What agents are told otherwise.

    Raises:
        ReplayError: No engine of the graph runs the model of the recording; or a subgraph cannot be listened to.
    """

    def __init__(
        self,
        app: CompiledChoreoGraph,
        header: RecordingHeader,
        timetable: Timetable | None = None,
        told: ToldOtherwise | None = None,
    ) -> None:
        self._app, self._header, self._timetable = app, header, timetable
        self._told = told or ToldOtherwise()
        self._stack = ExitStack()
        self._engines: dict[int, Engine] = {}
        self._apps: dict[bool, CompiledChoreoGraph] = {}
        self.recorded = recorded_engine(app, header)
        """The engine of the app that runs the recording's model."""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def engine(self) -> Engine:
        """The one that plays in its place."""
        return self._fresh(self.recorded)

    def app(self, *, kept: bool) -> CompiledChoreoGraph:
        """The graph; `kept`: with a memory of its own for its threads."""
        if kept not in self._apps:
            self._apps[kept] = self._compiled(self._app, InMemorySaver() if kept else None, "")
            self._told.require_used(self._used)
        return self._apps[kept]

    def _compiled(self, app: CompiledChoreoGraph, saver: Any, prefix: str) -> CompiledChoreoGraph:
        builder: Any = app.builder
        self._used: set[str] = set() if not prefix else self._used
        graph: ChoreoGraph = builder.origin
        nodes = {name: self._node(prefix + name, spec.runnable) for name, spec in graph.nodes.items()}
        copied = graph.with_policy(graph.policy)
        copied.nodes = {name: replace(spec, runnable=nodes[name]) for name, spec in graph.nodes.items()}
        choice, strict = builder.served
        return copied.compile(saver, engine=self._choice(choice), strict=strict, **stops_of(app))

    def _node(self, path: str, node: Any) -> Any:
        if isinstance(node, CompiledChoreoGraph):
            return self._compiled(node, node.checkpointer, f"{path}|")
        if isinstance(node, Agent):
            return self._agent(path, node)
        for inner in found(node, CompiledStateGraph):
            if isinstance(inner, CompiledChoreoGraph) or any(True for _ in agents_of(inner.builder)):
                raise ReplayError(
                    f"the node {path!r} has agents in a graph of LangGraph's own, or in a sequence: what its functions "
                    "return is not recorded. Make it a ChoreoGraph"
                )
        return node

    def _agent(self, path: str, agent: Agent) -> Agent:
        home = path.rpartition("|")[0]
        names = [path, *([f"{home}|{agent.persona}" if home else agent.persona] if agent.persona else [])]
        for name in names:
            if name in self._told.systems:
                self._used.add(f"{name}.system")
                agent = agent.with_system(self._told.systems[name])
            if name in self._told.prompts:
                self._used.add(f"{name}.prompt")
                agent = _asked(agent, self._told.prompts[name])
        if agent.engine is not None:
            agent = copy.copy(agent)
            assert agent.engine is not None
            agent.engine = self._fresh(agent.engine)
        return agent

    def _choice(self, choice: EngineChoice | None) -> EngineChoice | None:
        if choice is None or isinstance(choice, Engine):
            return None if choice is None else self._fresh(choice)
        return {name: self._fresh(engine) for name, engine in choice.items()}

    def _fresh(self, engine: Engine) -> Engine:
        """An engine like another, over the same model, with nothing encoded."""
        model = engine.model.adapter.fingerprint
        if isinstance(engine.model.adapter, WeightlessAdapter):
            raise ReplayError(
                f"{engine.model.name!r} is run by engines elsewhere: what they have run is played on an engine that "
                "computes here. Compile the graph with Engine.load() of the same model and dtype"
            )
        if id(engine) not in self._engines:
            is_recorded = model == self._header.conditions["model"]
            settings = engine.record.copy_of(timetable=self._timetable if is_recorded else None)
            if is_recorded:
                budget = {"kv_budget_bytes": self._header.kv_budget_bytes}
                settings["memory"] = settings["memory"].model_copy(update=budget)
                settings["seed"] = self._header.seed
            fresh = self._stack.enter_context(Engine.load(engine.model, **settings))
            engine.record.share_adapters(fresh.record)
            self._engines[id(engine)] = fresh
        return self._engines[id(engine)]


def recorded_engine(app: CompiledChoreoGraph, header: RecordingHeader) -> Engine:
    """The engine of a graph that runs the model of a recording; raises `ReplayError` if none does."""
    builder: Any = app.builder
    model = header.conditions["model"]
    for engine in builder.engines:
        if engine.model.adapter.fingerprint == model:
            return engine  # type: ignore[no-any-return]
    here = ", ".join(f"{engine.model.name!r} ({engine.model.adapter.fingerprint})" for engine in builder.engines)
    raise ReplayError(
        f"model: recorded with {header.model!r} ({model}), here {here or 'none'}. Compile the graph with an engine of "
        "that model and dtype"
    )


def _asked(agent: Agent, text: str) -> Agent:
    """A copy that is asked something else."""
    if agent.schema_prompt is not None:
        raise InvalidRequestError(f"agent {agent.name!r} has a prompt of a schema, which cannot be set")
    changed = copy.copy(agent)
    changed.prompt = text
    if isinstance(agent, Worker):

        def asked(state: Any) -> str:
            sent = sent_instruction(state)
            return text if sent is None else sent

        changed.prompt = asked
    return changed
