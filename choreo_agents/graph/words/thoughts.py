"""Thoughts of agents before their answers. Other agents never see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents.chat import THOUGHT_BLOCKS, Described, answer_header, thinking_before, thoughts_of
from choreo_agents.engine import Engine, Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, handle_for
from choreo_agents.graph.words.entries import if_alive
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, PromptText

Thinks = bool | int | None
"""Whether an agent thinks before it answers, or its maximum number of thought tokens; None: template's default."""


class Thinker(Protocol):
    """Agent that may think, as this module needs it."""

    name: str
    assistant_prefix: str | None
    tools: Described
    thinking: Thinks

    def speaker(self, state: Any, /) -> str: ...


def required_thinking(name: str, thinking: Any) -> Thinks:
    """Return a valid `thinking` option; raises `InvalidRequestError` for any other value."""
    if thinking is not None and (not isinstance(thinking, int) or thinking < 0):
        raise InvalidRequestError(f"thinking of {name!r} must be True, False or a number of tokens, not {thinking!r}")
    return False if thinking == 0 else thinking


def thinks(agent: Thinker, chat: ChatFormat) -> bool:
    """Return whether an agent thinks before it answers.

    Raises:
        InvalidRequestError: Thinking is requested, and the model's chat template has no thoughts.
    """
    if chat.thoughts is None and agent.thinking:
        raise InvalidRequestError(
            f"{agent.name!r} is to think, and the chat template of its model knows of no thoughts: leave thinking out"
        )
    if chat.thoughts is None or agent.thinking is not None:
        return bool(agent.thinking)
    return chat.thoughts.usual


def thinking_of(agent: Thinker, state: Any, chat: ChatFormat, free_positions: int) -> Thinking | None:
    """Return how an agent thinks in a call; None: it does not.

    Args:
        agent: The agent.
        state: State of the graph.
        chat: Chat format of its model.
        free_positions: Positions left for thoughts. They bound the default number of thought tokens, not the agent's.
    """
    if not thinks(agent, chat):
        return None
    limit = agent.thinking if isinstance(agent.thinking, int) and not isinstance(agent.thinking, bool) else None
    budget = limit if limit is not None else max(1, min(Thinking.budget, free_positions))
    if agent.assistant_prefix is None:
        return thinking_before(chat, agent.speaker(state), budget, calls=bool(agent.tools))
    lead = PromptText.special(agent.assistant_prefix)
    default = Thinking.of(chat, None, budget)
    return replace(default, answer=chat.assistant.opening(None) + lead, after=default.after + lead)


def header_of(agent: Thinker, state: Any, chat: ChatFormat) -> PromptText:
    """Return the header that a decode of an agent starts with."""
    if agent.assistant_prefix is None or thinks(agent, chat):
        return answer_header(chat, agent.speaker(state), thinks=thinks(agent, chat), calls=bool(agent.tools))
    opening, bare = chat.assistant.opening(None), chat.header(None)
    # A template that puts a space before the first word has it before an own header, too.
    return (opening if bare == opening.rstrip(" ") else bare) + PromptText.special(agent.assistant_prefix)


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


def opening_noted(agent: Thinker, state: Any) -> dict[str, str]:
    """Return the opening of an agent's turn, for encoding its text again."""
    if agent.assistant_prefix is not None:
        return {"header": agent.assistant_prefix}
    # An agent with tools starts without its name, which other readers get where its text is part of a user turn.
    return {"speaker": agent.speaker(state)} | ({"header": ""} if agent.tools else {})


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """Return a message as other agents see it: without its thoughts."""
    blocks = message.content if isinstance(message.content, list) else []
    visible = [block for block in blocks if not (isinstance(block, dict) and block.get("type") in THOUGHT_BLOCKS)]
    if len(visible) == len(blocks):
        return message
    is_text = all(isinstance(block, str) or block.get("type") == "text" for block in visible)
    return message.model_copy(update={"content": str(message.text) if is_text else visible})
