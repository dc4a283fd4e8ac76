"""Chat messages that no agent decoded: who said them, and the turns to encode."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, convert_to_messages
from langgraph.types import Command

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.models import ChatFormat

_SIGNATURE = "choreo_source"


def sign(node: str, output: Any) -> Any:
    """A plain node's output, with its name on the messages that it adds: they are its own, not input."""
    if isinstance(output, Command):
        return replace(output, update=sign(node, output.update))
    if isinstance(output, list) and any(isinstance(part, Command) for part in output):
        return [sign(node, part) for part in output]
    if not isinstance(output, Mapping) or not output.get("messages"):
        return output
    added = output["messages"]
    messages = convert_to_messages(added if isinstance(added, list) else [added])
    return {**output, "messages": [_signed(message, node) for message in messages]}


def _signed(message: BaseMessage, node: str) -> BaseMessage:
    if message.type == "remove":
        return message
    kwargs = {_SIGNATURE: node, **message.additional_kwargs}
    return message.model_copy(update={"additional_kwargs": kwargs})


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Messages in any form that LangChain takes. Those without an id, which LangGraph would have given, get one that
    is the same for every reader."""
    found = convert_to_messages(messages)
    for place, message in enumerate(found):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {message.type} {message.text}"))
    return found


def source_of(message: BaseMessage) -> str:
    """The plain node that wrote a message; input otherwise."""
    return str(message.additional_kwargs.get(_SIGNATURE, START_SOURCE))


def turn_of(message: BaseMessage, chat: ChatFormat) -> str:
    """A message as a chat turn.

    Raises:
        InvalidRequestError: It holds anything but text.
    """
    blocks = message.content if isinstance(message.content, list) else []
    if any(isinstance(block, dict) and block.get("type") != "text" for block in blocks):
        raise InvalidRequestError(f"message {message.id!r} holds more than text: only text can be encoded")
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return chat.turn("system", words)
    if isinstance(message, AIMessage):
        return chat.turn("assistant", words, message.name)
    return chat.turn("user", words, message.name)


def digest_of(message: BaseMessage) -> str:
    """Tells whether a message's words have changed since they were encoded."""
    return hashlib.sha256(str(message.text).encode("utf-8", "replace")).hexdigest()[:16]
