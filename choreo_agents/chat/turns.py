"""Chat messages as turns to encode, with tool calls and results: by the chat template of a model, or in our format."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, SystemMessage, ToolMessage

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import (
    ChatFormat,
    Kind,
    PromptText,
    ToolCall,
    TurnText,
    instructions,
    question,
    tool_result_turn,
    tools_format,
)

UserTurn = Literal["closed", "begun", "open"]
"""State of the user's turn at the end of a prompt: none or closed; opened, but still empty; or open with text in it."""


def separator(turn: UserTurn, kind: Kind, chat: ChatFormat) -> tuple[str, UserTurn]:
    """Return the text before a message of this kind, and the state of the user's turn behind the message.

    All messages between two turns of the model are parts of one user's turn, where templates demand alternating turns:

    open | question | between | bob: ... | close | the model's own turn | open | question | close | header
    """
    if kind == "turn":
        return "" if turn == "closed" else chat.user.after, "closed"
    between = {"closed": chat.user.plain, "begun": "", "open": chat.merges or ""}
    return between[turn], "open" if kind == "part" else "begun"


CALL_BLOCKS: Mapping[str, tuple[str, str, str]] = {
    "tool_use": ("name", "input", "id"),
    "tool_call": ("name", "args", "id"),
    "function_call": ("name", "arguments", "call_id"),
}
"""Types of content blocks that hold a call, and their keys of tool name, arguments and call id."""
THOUGHT_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoning_content"})
"""Types of content blocks that hold thoughts."""
_SIGNS = string.ascii_letters + string.digits
_LENGTH = 9
"""Length of a call id: Mistral's chat templates accept no other."""


def short_id(name: str) -> str:
    """Return an id that every template accepts for any call id; deterministic."""
    if re.fullmatch(rf"[A-Za-z0-9]{{{_LENGTH}}}", name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest())
    return "".join(_SIGNS[number // len(_SIGNS) ** place % len(_SIGNS)] for place in range(_LENGTH))


def tool_calls_of(message: BaseMessage) -> list[ToolCall]:
    """Return the calls of a message with their original ids, those in a provider's content blocks included."""
    if not isinstance(message, AIMessage):
        return []
    if isinstance(message.content, str) and not message.tool_calls and not message.invalid_tool_calls:
        return []
    ids = {call["id"] or "" for call in (*message.tool_calls, *message.invalid_tool_calls)}
    calls = [ToolCall(call["name"], call["args"], call["id"] or "") for call in message.tool_calls]
    return calls + [call for call in _calls_in_blocks(message) if call.id not in ids]


def calls_in(message: BaseMessage) -> list[ToolCall]:
    """Return the calls of a message, with ids that every template accepts."""
    return [replace(call, id=short_id(call.id)) for call in tool_calls_of(message)]


def _calls_in_blocks(message: AIMessage) -> Iterator[ToolCall]:
    for block in message.content if isinstance(message.content, list) else []:
        if isinstance(block, dict) and (names := CALL_BLOCKS.get(str(block.get("type")))) is not None:
            name, arguments, number = (block.get(key) for key in names)
            try:
                arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                arguments = {"": arguments}  # cut off: the call is kept
            yield ToolCall(str(name), arguments if isinstance(arguments, Mapping) else {}, str(number or ""))


def tools_called(messages: Iterable[BaseMessage]) -> dict[str, str]:
    """Return the name of the called tool by call id."""
    return {call.id: call.name for message in messages for call in tool_calls_of(message)}


_PIECES = ("tool_call_chunk", "invalid_tool_call", "input_json_delta")
"""Types of content blocks that repeat the message's calls."""


def words_in(message: BaseMessage) -> str:
    """Return the text of a message; in a tool result a note replaces each block that is no text.

    Raises:
        InvalidRequestError: Another message holds blocks that are neither text, thoughts nor calls.
    """
    allowed = {"text", *THOUGHT_BLOCKS, *((*CALL_BLOCKS, *_PIECES) if isinstance(message, AIMessage) else ())}
    blocks = message.content if isinstance(message.content, list) else ()
    foreign = [kind for block in blocks if isinstance(block, dict) and (kind := str(block.get("type"))) not in allowed]
    if isinstance(message, ToolMessage):
        return "\n".join([*filter(None, [str(message.text)]), *(f"[{kind} left out: no text]" for kind in foreign)])
    empty = any(isinstance(part, dict) and part.get("type") == "text" and part.get("text") is None for part in blocks)
    if foreign or empty:
        wrong = f"holds more than text, {foreign[0]!r}" if foreign else 'has a text block without "text"'
        author = f"{message.name!r}" if message.name else {"human": "the user", "ai": "the model"}.get(message.type)
        again = f", or remove the message with RemoveMessage({message.id!r})" if message.id else ""
        raise InvalidRequestError(f"a message of {author or message.type} {wrong}: leave that out{again}")
    return str(message.text)


def thoughts_of(message: BaseMessage) -> str:
    """Return the text of the thoughts in a message; redacted ones, which their provider has encrypted, have none."""
    blocks = message.content if isinstance(message.content, list) else ()
    thought = (block for block in blocks if isinstance(block, dict) and block.get("type") in THOUGHT_BLOCKS)
    texts = (block.get(str(block["type"])) for block in thought)
    # Bedrock has an object of text and signature here.
    return "".join(str((text.get("text") if isinstance(text, Mapping) else text) or "") for text in texts)


def template_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages as the dicts that Hugging Face chat templates take.

    Raises:
        InvalidRequestError: A message holds more than text.
    """
    called = tools_called(messages)
    return [_template_turn(message, called) for message in messages]


def _template_turn(message: BaseMessage, called: Mapping[str, str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role_of(message), "content": words_in(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage):
        turn["content"] = _model_text(message, turn["content"])
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
    """Return the role of a message in chat templates."""
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, FunctionMessage):
        return "tool"
    kind = message.type.removesuffix("MessageChunk").lower()
    return {"system": "system", "ai": "assistant", "tool": "tool"}.get(kind, "user")


def _model_text(message: AIMessage, words: str) -> str:
    """Return the text of an AI message, with its invalid calls as text."""
    for broken in message.invalid_tool_calls:
        words = f"{words}\n{broken['args']}".strip()
    return words


def message_turn(
    message: BaseMessage,
    chat: ChatFormat,
    *,
    later: bool = True,
    quoted: bool = False,
    called: Mapping[str, str] | None = None,
    opening: Mapping[str, Any] | None = None,
) -> TurnText:
    """Return a chat message as a turn, without its thoughts. Control tokens in its text are encoded as plain text.

    Args:
        message: The message.
        chat: Chat format of the model.
        later: Of a system prompt: whether other turns come before.
        quoted: Whether it is another agent's answer, and no assistant turn of the reader's.
        called: Names of the called tools by call id.
        opening: How the turn of an answer starts: a `header`, or its `speaker`.

    Raises:
        InvalidRequestError: It holds more than text.
    """
    words = words_in(message)
    if isinstance(message, SystemMessage) or role_of(message) in ("system", "developer"):
        return instructions(words, chat, later=later)
    if isinstance(message, ToolMessage):
        tool = message.name or (called or {}).get(message.tool_call_id) or "tool"
        return tool_result_turn(words, tool, short_id(message.tool_call_id), chat)
    if not isinstance(message, AIMessage):
        return question(words, chat, message.name)
    return _answer(message, words, chat, opening or {}, is_part=quoted and chat.merges is not None)


def _answer(message: AIMessage, words: str, chat: ChatFormat, opening: Mapping[str, Any], *, is_part: bool) -> TurnText:
    """Return an AI message as an assistant turn, or as a part of a user turn."""
    header, name = opening.get("header"), opening.get("speaker") or message.name
    words = _model_text(message, words)
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
    content = start + PromptText.plain(words)
    return TurnText(chat.assistant.opening(None) + content + PromptText.special(chat.turn_end))
