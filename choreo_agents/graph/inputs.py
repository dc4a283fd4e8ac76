"""Chat messages that no agent decoded, as turns to encode."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.models import ChatFormat


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Messages in any form that LangChain takes. Those without an id, which LangGraph would have given, get one that
    is the same for every reader."""
    found = convert_to_messages(messages)
    for place, message in enumerate(found):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {message.type} {message.text}"))
    return found


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
