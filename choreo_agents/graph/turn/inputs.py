"""Chat messages that no agent decoded, as what is to be encoded."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage

from choreo_agents.engine import Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.provenance.notes import REASONING, opening_of, thoughts_in
from choreo_agents.models import ChatFormat, FramedText, Said, instructions, question


def message_as(message: BaseMessage, chat: ChatFormat, *, later: bool = True, told: bool = False) -> Said:
    """A chat message as its reader gets it: whatever it says, only its frame has control tokens.

    How an agent's starts is taken from its notes, which must be proven. What it thought before it spoke is left out.

    Args:
        message: What is said.
        chat: The model's.
        later: Whether it comes after anything else, if it gives instructions.
        told: Whether somebody else's answer is told to the reader, and is none of the model's own turns.

    Raises:
        InvalidRequestError: It holds anything but text.
    """
    blocks = message.content if isinstance(message.content, list) else []
    if any(isinstance(block, dict) and block.get("type") not in ("text", REASONING) for block in blocks):
        raise InvalidRequestError(f"message {message.id!r} holds more than text: only text can be encoded")
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return instructions(words, chat, later=later)
    if not isinstance(message, AIMessage):
        return question(words, chat, message.name)
    is_part = told and chat.merges is not None
    opening = opening_of(message)
    header = opening.get("header")
    if header is None:
        name = opening.get("speaker") or message.name
        return Said(chat.part(words, name), "part") if is_part else Said(chat.turn("assistant", words, name))
    start = FramedText.frame(f"{header}{'' if str(header)[-1:].isspace() else ' '}")
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
