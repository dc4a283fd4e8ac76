"""Chat messages that no agent decoded, as the turns to encode."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.provenance.notes import opening_of
from choreo_agents.models import ChatFormat, FramedText


def turn_of(message: BaseMessage, chat: ChatFormat) -> FramedText:
    """A message as a chat turn: whatever it says, only the turn's own frame has control tokens.

    How an agent's starts is taken from its notes, which must be proven. What it thought before it spoke is left out.

    Raises:
        InvalidRequestError: It holds anything but text.
    """
    blocks = message.content if isinstance(message.content, list) else []
    if any(isinstance(block, dict) and block.get("type") not in ("text", "reasoning") for block in blocks):
        raise InvalidRequestError(f"message {message.id!r} holds more than text: only text can be encoded")
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return chat.turn("system", words)
    if isinstance(message, AIMessage):
        opening = opening_of(message)
        header = opening.get("header")
        if header is not None:
            start = FramedText.frame(f"{header}{'' if str(header)[-1:].isspace() else ' '}")
            return chat.assistant.opening(None) + start + FramedText.words(words) + FramedText.frame(chat.turn_end)
        return chat.turn("assistant", words, opening.get("speaker") or message.name)
    return chat.turn("user", words, message.name)
