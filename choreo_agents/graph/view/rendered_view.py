"""What one call reads, as chat messages: for callbacks, and through them for traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from choreo_agents.chat import Described
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.imported_prompt import PromptPart
from choreo_agents.graph.view.reader_rules import CallReader

MASK = "[confidential]"
"""What stands in a trace for words that are confidential."""
_NO_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": MASK}}


class RenderedView:
    """The view of one call in words, in its order: instructions, messages, and what is asked.

    Words are masked that are marked as confidential: messages of confidential agents, what these are told and asked,
    confidential modules, and what the private contexts say that the graph's policy names; unless the run is to show
    them (`RunOptions.trace_confidential`).

    Args:
        reader: Who reads.
    """

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._shows_all = reader.place.trace_confidential
        guarded = reader.rules.guard.declared.guarded
        self._is_private = reader.agent.confidential or reader.system.rpartition("|")[2] in guarded
        self.messages: list[BaseMessage] = []
        self.tools: Described = ()
        """What the reader is told that it may call, as chat models tell it: beside their messages."""

    def begin(
        self, public: str | None, system: str | None, tools: Described = (), imported: Iterable[PromptPart] = ()
    ) -> None:
        """Add what the reader is told first: the public root, and its own instructions or prompt of a schema."""
        self.tools = (_NO_TOOL,) * len(tools) if self._is_private and not self._shows_all else tools
        if public:
            self._add(SystemMessage(public))
        if system is not None:
            self._add(SystemMessage(system), confidential=self._is_private)
        for told in imported:
            kind = {"user": HumanMessage, "assistant": AIMessage}.get(told.role or "system", SystemMessage)
            self._add(kind(told.text), confidential=told.confidential or (told.is_own and self._is_private))

    def say(self, entry: HandleEntry, words: BaseMessage) -> None:
        """Add a message, with what its speaker was asked before it if that is in view."""
        confidential = bool(entry["confidential"])
        if (asked := entry.get("prompt_text")) is not None and self._reader.has_said(entry):
            self._add(HumanMessage(asked), confidential=confidential or self._is_private)
        self._add(words, confidential=confidential)

    def ask(self, prompt: str | None, *, confidential: bool = False) -> None:
        """Add what the reader is asked, or told in place of what it does not keep."""
        if prompt is not None:
            self._add(HumanMessage(prompt), confidential=confidential or self._is_private)

    def _add(self, message: BaseMessage, *, confidential: bool = False) -> None:
        self.messages.append(_masked(message) if confidential and not self._shows_all else message)


def _masked(message: BaseMessage) -> BaseMessage:
    """Who spoke, and nothing of what was said: made anew, since words may stand in any field of a message."""
    named = {"id": message.id, "name": message.name}
    if isinstance(message, ToolMessage):
        return ToolMessage(MASK, tool_call_id=message.tool_call_id, **named)
    kinds = (AIMessage, SystemMessage)
    kind = next((kind for kind in kinds if isinstance(message, kind)), HumanMessage)
    return kind(MASK, **named)
