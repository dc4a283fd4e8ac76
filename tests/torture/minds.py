"""What agents of random graphs do before they speak: think, call a tool, and each on a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama
from support.tool_templates import TOOL_TEMPLATES, tool_tokenizer
from support.visible_graphs import ECHO, MODES, Spec, State

from choreo_agents import Policy, Sampling, VisibilityRule
from choreo_agents.graph import ChoreoGraph
from choreo_agents.models import LoadedModel, load_model

PLAIN = ("plain", "plain")
"""Models whose template knows neither thoughts nor tools."""
_CALLING = Sampling(temperature=1.0, max_tokens=100)


@tool
def look(box: Literal["red", "blue"]) -> str:
    """Look."""
    return {"red": "A kite.", "blue": "No."}[box]


@dataclass(frozen=True)
class Minds:
    """Of one graph."""

    thinking: Mapping[str, int] = field(default_factory=dict)
    """Tokens that an agent thinks for at most."""
    callers: frozenset[str] = frozenset()
    """Who calls a tool instead of speaking."""
    on: Mapping[str, str] = field(default_factory=dict)
    """Which of its graph's engines an agent speaks on, if there are several."""
    hears: Mapping[tuple[str, str], VisibilityRule] = field(default_factory=dict)
    """Who reads what tools have answered: by the tools' node and the reader."""

    def rules(self, spec: Spec) -> Mapping[tuple[str, str], VisibilityRule]:
        """All of a graph."""
        return {**spec.rules, **self.hears}

    def graph(self, spec: Spec, policy: Policy, speech: Sampling) -> ChoreoGraph:
        """A graph whose agents speak so."""
        options = {speaker.name: self._options(speaker.name, speech) for speaker in spec.speakers}
        behind = {number: (tools_of(number), answer_calls) for number in self.calling(spec)}
        hearing = Spec(**(vars(spec) | {"rules": self.rules(spec)}))
        return hearing.graph(policy, options=options, behind=behind)

    def calling(self, spec: Spec) -> list[int]:
        """Layers in which somebody calls a tool."""
        return [number for number, layer in enumerate(spec.layers) if self.callers & {*layer}]

    def _options(self, name: str, speech: Sampling) -> dict[str, Any]:
        options: dict[str, Any] = {"sampling": speech}
        if name in self.callers:
            options = {"tools": [look], "tool_choice": "look", "sampling": _CALLING}
        if self.thinking:
            options["thinking"] = self.thinking.get(name, 0)
        return options | ({"engine": self.on[name]} if self.on else {})


@st.composite
def minds(draw: st.DrawFn, spec: Spec, families: Sequence[str]) -> Minds:
    """Any of a graph that models of these families serve."""
    names = [speaker.name for speaker in spec.speakers]
    served = {name: draw(st.integers(0, len(families) - 1)) for name in names}
    on = {name: ("one", "two")[at] for name, at in served.items()} if len(families) > 1 else {}
    if "plain" in families:
        return Minds(on=on)
    thinking = {name: draw(st.sampled_from([0, 3, 6])) for name in names}
    can_call = [name for name in names if families[served[name]] in TOOL_TEMPLATES]
    callers = draw(st.frozensets(st.sampled_from(can_call), max_size=2)) if can_call else frozenset[str]()
    found = Minds(thinking, callers, on)
    hears = {
        (tools_of(number), reader): VisibilityRule(mode)
        for number in found.calling(spec)
        for reader in names
        if (mode := draw(st.sampled_from(MODES))) is not None
    }
    return Minds(thinking, callers, on, hears)


def tools_of(layer: int) -> str:
    """The node that answers the calls of a layer."""
    return f"tools {layer}"


async def answer_calls(state: State, config: RunnableConfig) -> dict[str, Any]:
    """Answer all calls that are not answered yet, whoever has made them."""
    messages: Sequence[BaseMessage] = state["messages"]
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
    asked = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    left = [{**call, "type": "tool_call"} for call in asked if call["id"] not in answered]
    return await ToolNode([look]).ainvoke(left, config) if left else {}


def speakers_of(spec: Spec) -> dict[str, str]:
    """The persona of each agent; of others, who have none, their own name."""
    return {speaker.name: speaker.persona for speaker in spec.speakers} | {ECHO: ECHO}


def load_mind(folder: Path, family: str, seed: int) -> LoadedModel:
    """A random model of a family, saved once."""
    if not folder.exists():
        if family == "plain":
            save_tiny_llama(folder, seed=seed)
        else:
            tokenizer = tool_tokenizer(family) if family in TOOL_TEMPLATES else tokenizer_for(family)
            end = tokenizer.eos_token_id
            save_tiny_llama(folder, seed=seed, tokenizer=tokenizer, eos_token_id=end, max_position_embeddings=8192)
    return load_model(folder)
