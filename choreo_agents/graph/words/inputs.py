"""Chat messages that no agent decoded, as what is to be encoded."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from choreo_agents.chat import CALL_BLOCKS, THOUGHT_BLOCKS, calls_in, result_turn
from choreo_agents.engine import Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.provenance.notes import opening_of, thoughts_in
from choreo_agents.models import ChatFormat, FramedText, Said, calls_as_words, calls_said, instructions, question


def message_as(
    message: BaseMessage,
    chat: ChatFormat,
    *,
    later: bool = True,
    told: bool = False,
    called: Mapping[str, str] | None = None,
) -> Said:
    """A chat message as its reader gets it: whatever it says, only its frame has control tokens.

    How an agent's starts is taken from its notes, which must be proven. What it thought before it spoke is left out,
    and so is what other providers' models have thought; calls in blocks of theirs are calls.

    Args:
        message: What is said.
        chat: The model's.
        later: Whether it comes after anything else, if it gives instructions.
        told: Whether somebody else's answer is told to the reader, and is none of the model's own turns.
        called: Which tool each call of the conversation names, by its id.

    Raises:
        InvalidRequestError: It holds anything else, an image or a sound: says what.
    """
    known = {"text", *THOUGHT_BLOCKS, *(CALL_BLOCKS if isinstance(message, AIMessage) else ())}
    blocks = message.content if isinstance(message.content, list) else []
    if other := [
        str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") not in known
    ]:
        raise InvalidRequestError(
            f"message {message.id!r} holds more than text, {other[0]!r}: only text can be encoded"
        )
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return instructions(words, chat, later=later)
    if isinstance(message, ToolMessage):
        return result_turn(message, called or {}, chat)
    if not isinstance(message, AIMessage):
        return question(words, chat, message.name)
    return _answer(message, words, chat, is_part=told and chat.merges is not None)


def _answer(message: AIMessage, words: str, chat: ChatFormat, *, is_part: bool) -> Said:
    """What a model has said: its turn, or a part of a user's."""
    opening = opening_of(message)
    header, name = opening.get("header"), opening.get("speaker") or message.name
    for broken in message.invalid_tool_calls:
        words = f"{words}\n{broken['args']}".strip()  # what could not be read as a call was said all the same
    if calls := calls_in(message):
        words = f"{header} {words}".strip() if header else words
        if is_part:
            return Said(chat.part(f"{words}\n{calls_as_words(calls, chat)}".strip(), name), "part")
        return Said(calls_said(words, calls, chat))
    if header is None or (is_part and not header):
        return Said(chat.part(words, name), "part") if is_part else Said(chat.turn("assistant", words, name))
    start = FramedText.frame(f"{header}{'' if not header or str(header)[-1:].isspace() else ' '}")
    if is_part:
        return Said(start + chat.part(words), "part")
    said = start + FramedText.words(words)
    return Said(chat.assistant.opening(None) + said + FramedText.frame(chat.turn_end))


def thought_out(message: BaseMessage, chat: ChatFormat) -> FramedText | None:
    """An agent's own message with the thoughts that stand in it, as its model's template shows them to it.

    None if there are none, or the template does not show them again.
    """
    thoughts = thoughts_in(message)
    if not thoughts or chat.thoughts is None or not chat.thoughts.kept:
        return None
    opening = opening_of(message)
    header = opening.get("header")
    thinking = Thinking.of(chat, (opening.get("speaker") or message.name) if header is None else None)
    lead = thinking.after if header is None else thinking.after + FramedText.frame(str(header))
    blank = "" if lead.text == "" or lead.text[-1:].isspace() else " "
    return (
        chat.header(None, thinking=True)
        + FramedText.words(thoughts)
        + FramedText.frame(thinking.before + thinking.end)
        + lead
        + FramedText.words(blank + str(message.text))
        + FramedText.frame(chat.turn_end)
    )
