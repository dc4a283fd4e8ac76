"""Whose a tool's result is: that of who has called it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from choreo_agents.chat import calls_made
from choreo_agents.graph.provenance.notes import is_confidential, persona_of, writer_of
from choreo_agents.graph.visibility import START_SOURCE


class ToolCaller(NamedTuple):
    """Who called a tool whose result a node of the graph has written."""

    author: str
    persona: str | None
    confidential: bool
    node: str
    """The one that has written it."""


def callers_of(messages: Sequence[BaseMessage]) -> dict[str, ToolCaller]:
    """The callers of results, by the ids of these messages.

    A result that comes as input is input's, whatever call it names; so is what answers a call that came as input.

    Args:
        messages: Of the state, as far as it is proven who said them.
    """
    calls: dict[str, AIMessage] = {}
    for message in messages:
        if isinstance(message, AIMessage) and writer_of(message) != START_SOURCE:
            for call in calls_made(message):
                # Whoever names it later has it from here.
                calls.setdefault(call.id, message)
    found: dict[str, ToolCaller] = {}
    for message in messages:
        if isinstance(message, ToolMessage) and (node := writer_of(message)) != START_SOURCE:
            asked = calls.get(message.tool_call_id)
            if asked is not None:
                found[str(message.id)] = ToolCaller(writer_of(asked), persona_of(asked), is_confidential(asked), node)
    return found
