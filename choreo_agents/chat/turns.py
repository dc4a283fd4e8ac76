"""Chat messages as what is to be encoded: turns as a template reads them, or turns of our format, with the calls and
results of a conversation as they are told to a model again."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, SystemMessage, ToolMessage

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import (
    ChatFormat,
    PromptText,
    ToolCall,
    TurnText,
    instructions,
    question,
    tool_result_turn,
    tools_format,
)

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


def result_turn(message: ToolMessage, words: str, called: Mapping[str, str], chat: ChatFormat) -> TurnText:
    """What a tool has returned.

    Args:
        message: Has it.
        words: What it says.
        called: Which tool each call names, by its id.
        chat: The model's.
    """
    tool = message.name or called.get(message.tool_call_id) or "tool"
    return tool_result_turn(words, tool, short_id(message.tool_call_id), chat)


_WORDS = {"reasoning": "reasoning", "thinking": "thinking", "reasoning_content": "reasoning_content"}
"""Where blocks that hold thoughts have their words, by their kinds; others are sealed by who wrote them."""
_PIECES = ("tool_call_chunk", "invalid_tool_call", "input_json_delta")
"""Kinds of blocks that say again what stands in a message's calls."""


def words_in(message: BaseMessage) -> str:
    """Return a message's text; in a tool's result a note stands for what is no text.

    Raises:
        InvalidRequestError: Any other message holds anything but text, thoughts and calls: says what.
    """
    known = {"text", *THOUGHT_BLOCKS, *((*CALL_BLOCKS, *_PIECES) if isinstance(message, AIMessage) else ())}
    blocks = message.content if isinstance(message.content, list) else ()
    others = [kind for each in blocks if isinstance(each, dict) and (kind := str(each.get("type"))) not in known]
    if isinstance(message, ToolMessage):
        return "\n".join([*filter(None, [str(message.text)]), *(f"[{kind} left out: no text]" for kind in others)])
    empty = any(isinstance(each, dict) and each.get("type") == "text" and each.get("text") is None for each in blocks)
    if others or empty:
        wrong = f"holds more than text, {others[0]!r}" if others else 'has a block of text without "text"'
        whose = f"{message.name!r}" if message.name else {"human": "the user", "ai": "the model"}.get(message.type)
        again = f", or remove it from its thread by RemoveMessage({message.id!r})" if message.id else ""
        raise InvalidRequestError(f"a message of {whose or message.type} {wrong}: leave that out{again}")
    return str(message.text)


def thoughts_of(message: BaseMessage) -> str:
    """What a message says that its model has thought."""
    blocks = message.content if isinstance(message.content, list) else ()
    thought = (block for block in blocks if isinstance(block, dict) and block.get("type") in _WORDS)
    said = (block.get(_WORDS[str(block["type"])]) for block in thought)
    # Bedrock has the words beside its signature of them.
    return "".join(str((each.get("text") if isinstance(each, Mapping) else each) or "") for each in said)


def template_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    Raises:
        InvalidRequestError: One holds more than text.
    """
    called = tools_called(messages)
    return [_template_turn(message, called) for message in messages]


def _template_turn(message: BaseMessage, called: Mapping[str, str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role_of(message), "content": words_in(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage):
        turn["content"] = _said_by_model(message, turn["content"])
        if thoughts := thoughts_of(message):
            turn["reasoning_content"] = thoughts
        if calls := calls_in(message):
            turn["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in calls
            ]
    elif isinstance(message, ToolMessage):
        turn["name"] = message.name or called.get(message.tool_call_id) or "tool"
        turn["tool_call_id"] = short_id(message.tool_call_id)
    return turn


def role_of(message: BaseMessage) -> str:
    """As templates call it."""
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, FunctionMessage):
        return "tool"
    return {"system": "system", "ai": "assistant", "tool": "tool"}.get(
        message.type.removesuffix("MessageChunk").lower(), "user"
    )


def _said_by_model(message: AIMessage, words: str) -> str:
    """Its words, with what could not be read as a call: it was said all the same."""
    for broken in message.invalid_tool_calls:
        words = f"{words}\n{broken['args']}".strip()
    return words


def message_turn(
    message: BaseMessage,
    chat: ChatFormat,
    *,
    later: bool = True,
    told: bool = False,
    called: Mapping[str, str] | None = None,
    opening: Mapping[str, Any] | None = None,
) -> TurnText:
    """A chat message as a turn of its own: whatever it says, only its frame has control tokens.

    What was thought before it is left out.

    Args:
        message: What is said.
        chat: The model's.
        later: Whether it comes after anything else, if it gives instructions.
        told: Whether somebody else's answer is told to the reader, and is none of the model's own turns.
        called: Which tool each call of the conversation names, by its id.
        opening: How the turn of an answer starts: a `header`, or its `speaker`.

    Raises:
        InvalidRequestError: It holds more than text.
    """
    words = words_in(message)
    if isinstance(message, SystemMessage) or role_of(message) in ("system", "developer"):
        return instructions(words, chat, later=later)
    if isinstance(message, ToolMessage):
        return result_turn(message, words, called or {}, chat)
    if not isinstance(message, AIMessage):
        return question(words, chat, message.name)
    return _answer(message, words, chat, opening or {}, is_part=told and chat.merges is not None)


def _answer(message: AIMessage, words: str, chat: ChatFormat, opening: Mapping[str, Any], *, is_part: bool) -> TurnText:
    """What a model has said: its turn, or a part of a user's."""
    header, name = opening.get("header"), opening.get("speaker") or message.name
    words = _said_by_model(message, words)
    if calls := calls_in(message):
        words = f"{header} {words}".strip() if header else words
        if is_part:
            written = tools_format(chat).grammar.write(calls).text.strip()
            return TurnText(chat.part(f"{words}\n{written}".strip(), name), "part")
        return TurnText(tools_format(chat).turn(words, calls))
    if header is None or (is_part and not header):
        return TurnText(chat.part(words, name), "part") if is_part else TurnText(chat.turn("assistant", words, name))
    start = PromptText.special(f"{header}{'' if not header or str(header)[-1:].isspace() else ' '}")
    if is_part:
        return TurnText(start + chat.part(words), "part")
    said = start + PromptText.plain(words)
    return TurnText(chat.assistant.opening(None) + said + PromptText.special(chat.turn_end))
