"""Chat messages that no agent decoded, as turns to encode."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.models import ChatFormat


def turn_of(message: BaseMessage, chat: ChatFormat) -> tuple[str, str]:
    """Source and chat turn of a message from outside: a person's, a tool's, or a plain node's.

    Raises:
        InvalidRequestError: It holds anything but text.
    """
    blocks = message.content if isinstance(message.content, list) else []
    if any(isinstance(block, dict) and block.get("type") != "text" for block in blocks):
        raise InvalidRequestError(f"message {message.id!r} holds more than text: only text can be encoded")
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return START_SOURCE, chat.turn("system", words)
    if isinstance(message, HumanMessage):
        return START_SOURCE, chat.turn("user", words, message.name)
    author = message.name or message.type
    if isinstance(message, AIMessage):
        return author, chat.turn("assistant", words, message.name)
    return author, chat.turn("user", words, message.name)
