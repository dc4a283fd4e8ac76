"""A conversation put together turn by turn, where each message is a span of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, SystemMessage

from choreo_agents.chat.history import tools_called
from choreo_agents.chat.tools import own_turns
from choreo_agents.chat.turns import role_of, turn_said, words_in
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, FramedText, Said


class ChatSpan(NamedTuple):
    """A part of a conversation."""

    text: FramedText
    role: str
    """Of who says it; empty: it is what stands around turns, and nobody's."""
    handle: MessageHandle | None = None
    """Of a message that is read as it was encoded, in the place of a text."""


def spans_of(
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    chat: ChatFormat,
    parents: Sequence[MessageHandle | BaseMessage] = (),
) -> list[ChatSpan]:
    """All that a model reads before the header of its answer.

    Args:
        messages: Of the conversation. Instructions that come first, and tools, are told first.
        tools: Descriptions of those that the model may call.
        chat: The model's.
        parents: Messages that are read behind those instructions, each a turn of its own: as they were encoded, or in
            their words.

    Raises:
        InvalidRequestError: A message holds more than text.
    """
    laid, rest = _Laying(chat), list(messages)
    first = rest.pop(0) if rest and isinstance(rest[0], SystemMessage) else None
    laid.add(FramedText.frame(chat.bos), "")
    if first is None and not tools:
        laid.add(FramedText.frame(chat.default_system), "")
    for said in own_turns(None if first is None else words_in(first), tuple(tools), chat, later=False):
        laid.say(said, "system")
    for parent in parents:
        if isinstance(parent, BaseMessage):
            laid.say(turn_said(parent, chat), role_of(parent))
        else:
            laid.close()
            laid.spans.append(ChatSpan(FramedText(), "assistant", parent))
    called = tools_called(messages)
    for message in rest:
        laid.say(turn_said(message, chat, called=called), role_of(message))
    laid.close()
    return laid.spans


class _Laying:
    """Puts parts of a user's turn into one, where users and model must take turns."""

    def __init__(self, chat: ChatFormat) -> None:
        self.spans: list[ChatSpan] = []
        self._chat = chat
        self._is_open = self._has_part = False

    def add(self, text: FramedText, role: str) -> None:
        """Append a span, if it says anything."""
        self.spans += [ChatSpan(text, role)] if text else []

    def say(self, said: Said, role: str) -> None:
        """Append a turn, or a part of one."""
        if said.kind == "turn":
            self.close()
        elif not self._is_open:
            self._around(self._chat.user.plain)
        elif self._has_part:
            self._around(self._chat.merges or "")
        self._is_open = said.kind != "turn"
        self._has_part = said.kind == "part"
        self.add(said.text, role)

    def close(self) -> None:
        """Close a user's turn, if one is open."""
        if self._is_open:
            self._around(self._chat.user.after)
        self._is_open = self._has_part = False

    def _around(self, text: str) -> None:
        self.add(FramedText.frame(text), "")
