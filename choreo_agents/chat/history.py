"""Calls and results of a conversation, as they are told to a model again."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from choreo_agents.models import ChatFormat, Said, ToolCall, result_said

CALL_BLOCKS: Mapping[str, tuple[str, str, str]] = {
    "tool_use": ("name", "input", "id"),
    "tool_call": ("name", "args", "id"),
    "function_call": ("name", "arguments", "call_id"),
}
"""Kinds of blocks that hold a call, and where: the tool's name, its arguments, the call's id."""
THOUGHT_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoning_content"})
"""Kinds of blocks that hold what was thought before an answer."""
_SIGNS = string.ascii_letters + string.digits
_LENGTH = 9
"""Letters and digits of a call's id: some chat templates take no other number of them."""


def short_id(name: str) -> str:
    """An id that every template takes, for one that anybody has given; the same for the same."""
    if re.fullmatch(rf"[A-Za-z0-9]{{{_LENGTH}}}", name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest())
    return "".join(_SIGNS[number // len(_SIGNS) ** place % len(_SIGNS)] for place in range(_LENGTH))


def calls_made(message: BaseMessage) -> list[ToolCall]:
    """The calls that a message makes, with their ids as they were given: also those in blocks that a provider wrote."""
    if not isinstance(message, AIMessage):
        return []
    if isinstance(message.content, str) and not message.tool_calls and not message.invalid_tool_calls:
        return []
    told = {call["id"] or "" for call in (*message.tool_calls, *message.invalid_tool_calls)}
    calls = [ToolCall(call["name"], call["args"], call["id"] or "") for call in message.tool_calls]
    return calls + [call for call in _in_blocks(message) if call.id not in told]


def calls_in(message: BaseMessage) -> list[ToolCall]:
    """The calls that a message makes, with ids that every template takes."""
    return [replace(call, id=short_id(call.id)) for call in calls_made(message)]


def _in_blocks(message: AIMessage) -> Iterator[ToolCall]:
    for block in message.content if isinstance(message.content, list) else []:
        if isinstance(block, dict) and (names := CALL_BLOCKS.get(str(block.get("type")))) is not None:
            name, given, number = (block.get(each) for each in names)
            try:
                given = json.loads(given or "{}") if isinstance(given, str) else given
            except (ValueError, RecursionError):
                given = {"": given}  # cut off, and said all the same
            yield ToolCall(str(name), given if isinstance(given, Mapping) else {}, str(number or ""))


def tools_called(messages: Iterable[BaseMessage]) -> dict[str, str]:
    """Which tool each call names, by its id."""
    return {call.id: call.name for message in messages for call in calls_made(message)}


def result_turn(message: ToolMessage, words: str, called: Mapping[str, str], chat: ChatFormat) -> Said:
    """What a tool has returned.

    Args:
        message: Has it.
        words: What it says.
        called: Which tool each call names, by its id.
        chat: The model's.
    """
    tool = message.name or called.get(message.tool_call_id) or "tool"
    return result_said(words, tool, short_id(message.tool_call_id), chat)
