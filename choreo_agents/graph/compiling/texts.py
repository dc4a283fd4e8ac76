"""What the personas of a graph are told, as an engine encodes it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from choreo_agents.chat import own_turns
from choreo_agents.engine import Engine
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.audit.labels import OwnTexts
from choreo_agents.graph.compiling.charting import found
from choreo_agents.models import ModelAdapter, instructions

Texts = dict[str, dict[str, frozenset[tuple[int, ...]]]]


def texts_of(builder: StateGraph[Any, Any, Any, Any], engine: Engine, prefix: str = "") -> OwnTexts:
    """By persona and by the name of the context: system prompts, prompts of schemas and the modules that these import.

    Args:
        builder: The graph, compiled.
        engine: Whose tokens are asked for.
        prefix: The nodes that it stands in: `team|`.
    """
    made: Texts = {}
    for name, spec in builder.nodes.items():
        for inner in found(spec.runnable, CompiledStateGraph):
            for persona, texts in texts_of(inner.builder, engine, f"{prefix}{name}|").items():
                made.setdefault(persona, {}).update(texts)
        for agent in found(spec.runnable, Agent):
            persona = prefix + (agent.persona or name)
            own = made.setdefault(persona, {})
            told = {} if agent.imported is None else agent.imported.texts(f"{persona}.system")
            fixed = agent.system if isinstance(agent.system, str) else None
            if fixed is not None or agent.tools:
                # Behind a public root they come later; behind private contexts, too, where there is none.
                orders = {True, bool(agent.public) or agent.imported is not None}
                forms = [form for later in orders for form in own_turns(fixed, agent.tools, engine.chat, later=later)]
                if fixed is not None:
                    forms.append(instructions(fixed, engine.chat, later=True))
                encoded = {tuple(engine.model.encode(form.text)) for form in forms}
                told = {**told, f"{persona}.system": {*told.get(f"{persona}.system", ()), *encoded}}
            for context, texts in told.items():
                own[context] = own.get(context, frozenset()) | texts
    return made


class TextsByModel:
    """What the personas of a graph are told, as engines encode it: worked out once for each model.

    Args:
        builder: The graph, compiled.
    """

    def __init__(self, builder: StateGraph[Any, Any, Any, Any]) -> None:
        self._builder = builder
        self._made: WeakKeyDictionary[ModelAdapter, OwnTexts] = WeakKeyDictionary()

    def __call__(self, engine: Engine) -> OwnTexts:
        adapter = engine.model.adapter
        if adapter not in self._made:
            self._made[adapter] = texts_of(self._builder, engine)
        return self._made[adapter]
