"""Calls and results of a conversation, as they are told to a model again."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Mapping

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from choreo_agents.models import ChatFormat, Said, ToolCall, result_said

_SIGNS = string.ascii_letters + string.digits
_LENGTH = 9
"""Letters and digits of a call's id: some chat templates take no other number of them."""


def short_id(name: str) -> str:
    """An id that every template takes, for one that anybody has given; the same for the same."""
    if re.fullmatch(rf"[A-Za-z0-9]{{{_LENGTH}}}", name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest())
    return "".join(_SIGNS[number // len(_SIGNS) ** place % len(_SIGNS)] for place in range(_LENGTH))


def calls_in(message: BaseMessage) -> list[ToolCall]:
    """The calls that a message makes."""
    if not isinstance(message, AIMessage):
        return []
    return [ToolCall(call["name"], call["args"], short_id(call["id"] or "")) for call in message.tool_calls]


def tools_called(messages: Iterable[BaseMessage]) -> dict[str, str]:
    """Which tool each call names, by its id."""
    calls = (call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls)
    return {str(call["id"]): call["name"] for call in calls}


def result_turn(message: ToolMessage, called: Mapping[str, str], chat: ChatFormat) -> Said:
    """What a tool has returned.

    Args:
        message: Has it.
        called: Which tool each call names, by its id.
        chat: The model's.
    """
    tool = message.name or called.get(message.tool_call_id) or "tool"
    return result_said(str(message.text), tool, short_id(message.tool_call_id), chat)
