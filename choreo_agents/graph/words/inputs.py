"""Chat messages that no agent decoded, as what is to be encoded."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_core.messages import BaseMessage

from choreo_agents.chat import thoughts_said, turn_said
from choreo_agents.engine import Thinking
from choreo_agents.graph.signer import opening_of
from choreo_agents.models import ChatFormat, FramedText, Said


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
    return turn_said(message, chat, later=later, told=told, called=called, opening=opening_of(message))


def thought_out(message: BaseMessage, chat: ChatFormat) -> FramedText | None:
    """An agent's own message with the thoughts that stand in it, as its model's template shows them to it.

    None if there are none, or the template does not show them again.
    """
    thoughts = thoughts_said(message)
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
