"""Thoughts of agents before their answers. Other agents never see them."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage

from choreo_agents.chat import (
    THOUGHT_BLOCKS,
    Thinks,
    thoughts_of,
)
from choreo_agents.engine import Engine, Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, handle_for
from choreo_agents.graph.words.entries import if_alive
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, PromptText


def required_thinking(name: str, thinking: Any) -> Thinks:
    """Return a valid `thinking` option; raises `InvalidRequestError` for any other value."""
    if thinking is not None and (not isinstance(thinking, int) or thinking < 0):
        raise InvalidRequestError(f"thinking of {name!r} must be True, False or a number of tokens, not {thinking!r}")
    return False if thinking == 0 else thinking


def with_thinking(message: BaseMessage, chat: ChatFormat) -> PromptText | None:
    """Return an agent's own earlier message with its thoughts, as its model's template renders both.

    None if it has no thoughts, or the template drops them.
    """
    thoughts = thoughts_of(message)
    if not thoughts or chat.thoughts is None or not chat.thoughts.kept:
        return None
    opening = opening_of(message)
    header = opening.get("header")
    thinking = Thinking.of(chat, (opening.get("speaker") or message.name) if header is None else None)
    lead = thinking.after if header is None else thinking.after + PromptText.special(str(header))
    blank = "" if lead.text == "" or lead.text[-1:].isspace() else " "
    return (
        chat.header(None, thinking=True)
        + PromptText.plain(thoughts)
        + PromptText.special(thinking.before + thinking.end)
        + lead
        + PromptText.plain(blank + str(message.text))
        + PromptText.special(chat.turn_end)
    )


def keeps_thoughts(chat: ChatFormat, entry: HandleEntry) -> bool:
    """Return whether a model's template renders the thoughts of an agent's own earlier message."""
    return chat.thoughts is not None and chat.thoughts.kept and "thoughts" in entry


def own_message(engine: Engine, entry: HandleEntry, message: BaseMessage | None) -> MessageHandle | PromptText:
    """Return an agent's own earlier message as its model's template renders it, with or without thoughts.

    Args:
        engine: Engine of the agent.
        entry: Entry of the message.
        message: The message. Its thoughts are encoded again where the decoded ones are lost, or were edited.
    """
    plain, model = entry.get("thoughts"), engine.model.adapter.fingerprint
    thought = None if plain is None else MessageHandle.model_validate(plain)
    # Thoughts of another model are tokens of that model only: they are left out.
    if keeps_thoughts(engine.chat, entry) and (thought is None or thought.base_model == model):
        live = if_alive(engine, thought)
        text = None if message is None or live is not None else with_thinking(message, engine.chat)
        if (content := live or text) is not None:
            return content
    return handle_for(entry, model) or MessageHandle.model_validate(entry["handle"])


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """Return a message as other agents see it: without its thoughts."""
    blocks = message.content if isinstance(message.content, list) else []
    visible = [block for block in blocks if not (isinstance(block, dict) and block.get("type") in THOUGHT_BLOCKS)]
    if len(visible) == len(blocks):
        return message
    is_text = all(isinstance(block, str) or block.get("type") == "text" for block in visible)
    return message.model_copy(update={"content": str(message.text) if is_text else visible})
