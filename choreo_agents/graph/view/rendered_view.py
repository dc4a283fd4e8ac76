"""Renders a call's view as chat messages, for callbacks and traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from choreo_agents.chat import Described
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.imported_prompt import PromptPart
from choreo_agents.graph.view.reader_rules import CallReader

MASK = "[confidential]"
"""Replacement for confidential text in traces."""
_NO_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": MASK}}


class RenderedView:
    """The view of one call as chat messages, in its order: instructions, messages and prompt.

    Confidential text is masked unless the run shows it (`RunOptions.trace_confidential`): messages, system prompts and
    prompts of confidential agents, confidential modules, and the private contexts that the graph's policy names.

    It begins with the public root and the reader's own instructions, or prompt of a schema.

    Args:
        reader: The reader of the call.
        system: Its own system prompt.
        imported: The parts of its prompt of a schema.
    """

    def __init__(self, reader: CallReader, system: str | None, imported: Iterable[PromptPart]) -> None:
        self._reader, public, tools = reader, reader.rules.shared_system, reader.agent.tools
        self._shows_all = reader.place.trace_confidential
        guarded = {context.name for context in reader.rules.guard.chart.guarded}
        self._is_private = reader.agent.confidential or reader.system.rpartition("|")[2] in guarded
        self.messages: list[BaseMessage] = []
        self.tools: Described = (_NO_TOOL,) * len(tools) if self._is_private and not self._shows_all else tools
        """The tools that the reader may call, as chat models describe them: beside the messages."""
        if public:
            self._add(SystemMessage(public))
        if system is not None:
            self._add(SystemMessage(system), confidential=self._is_private)
        for part in imported:
            kind = {"user": HumanMessage, "assistant": AIMessage}.get(part.role or "system", SystemMessage)
            self._add(kind(part.text), confidential=part.confidential or (part.is_own and self._is_private))

    def add_message(self, entry: HandleEntry, words: BaseMessage) -> None:
        """Add a message, and before it the prompt of its author if that is in the view."""
        confidential = bool(entry["confidential"])
        if (prompt := entry.get("prompt_text")) is not None and self._reader.has_said(entry):
            self._add(HumanMessage(prompt), confidential=confidential or self._is_private)
        self._add(words, confidential=confidential)

    def ask(self, prompt: str | None, *, confidential: bool = False) -> None:
        """Add the reader's prompt, or the summary in place of messages outside its history."""
        if prompt is not None:
            self._add(HumanMessage(prompt), confidential=confidential or self._is_private)

    def _add(self, message: BaseMessage, *, confidential: bool = False) -> None:
        self.messages.append(_masked(message) if confidential and not self._shows_all else message)


def _masked(message: BaseMessage) -> BaseMessage:
    """Return a message with author and type only. It is made anew, since text may stand in any field of a message."""
    named = {"id": message.id, "name": message.name}
    if isinstance(message, ToolMessage):
        return ToolMessage(MASK, tool_call_id=message.tool_call_id, **named)
    kinds = (AIMessage, SystemMessage)
    kind = next((kind for kind in kinds if isinstance(message, kind)), HumanMessage)
    return kind(MASK, **named)
