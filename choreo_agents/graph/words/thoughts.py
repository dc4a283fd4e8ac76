"""What an agent thinks before it speaks: its own, and no part of what others get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents.chat import THOUGHT_BLOCKS, Described, answer_header, thinking_before, thoughts_of
from choreo_agents.engine import Engine, Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, handle_for
from choreo_agents.graph.words.entries import live_handle
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, PromptText

Thinks = bool | int | None
"""Whether an agent thinks before it speaks, or for how many tokens at most; None: as its model's template has it."""


class Thinker(Protocol):
    """What is asked of an agent that may think."""

    name: str
    assistant_prefix: str | None
    tools: Described
    thinking: Thinks

    def speaker(self, state: Any, /) -> str: ...


def required_thinking(name: str, thinking: Any) -> Thinks:
    """The same; raises `InvalidRequestError` if it says nothing about thinking."""
    if thinking is not None and (not isinstance(thinking, int) or thinking < 0):
        raise InvalidRequestError(f"thinking of {name!r} must be True, False or a number of tokens, not {thinking!r}")
    return False if thinking == 0 else thinking


def thinks(agent: Thinker, chat: ChatFormat) -> bool:
    """Whether an agent thinks before it speaks.

    Raises:
        InvalidRequestError: It is to, and the model's template knows of no thoughts.
    """
    if chat.thoughts is None and agent.thinking:
        raise InvalidRequestError(
            f"{agent.name!r} is to think, and the chat template of its model knows of no thoughts: leave thinking out"
        )
    if chat.thoughts is None or agent.thinking is not None:
        return bool(agent.thinking)
    return chat.thoughts.usual


def thinking_of(agent: Thinker, state: Any, chat: ChatFormat, room: int) -> Thinking | None:
    """How an agent thinks in a call; None: not at all.

    Args:
        agent: Who speaks.
        state: The graph's.
        chat: Of its model.
        room: Positions of the context that thoughts can take: the usual number of tokens is lowered to it, that which
            the agent asks for is not.
    """
    if not thinks(agent, chat):
        return None
    asked = agent.thinking if isinstance(agent.thinking, int) and not isinstance(agent.thinking, bool) else None
    budget = asked if asked is not None else max(1, min(Thinking.budget, room))
    if agent.assistant_prefix is None:
        return thinking_before(chat, agent.speaker(state), budget, calls=bool(agent.tools))
    lead = PromptText.special(agent.assistant_prefix)
    usual = Thinking.of(chat, None, budget)
    return replace(usual, answer=chat.assistant.opening(None) + lead, after=usual.after + lead)


def header_of(agent: Thinker, state: Any, chat: ChatFormat) -> PromptText:
    """What a decode of an agent starts with."""
    if agent.assistant_prefix is None or thinks(agent, chat):
        return answer_header(chat, agent.speaker(state), thinks=thinks(agent, chat), calls=bool(agent.tools))
    opening, bare = chat.assistant.opening(None), chat.header(None)
    # The space before the first word stays before a header of its own.
    return (opening if bare == opening.rstrip(" ") else bare) + PromptText.special(agent.assistant_prefix)


def with_thinking(message: BaseMessage, chat: ChatFormat) -> PromptText | None:
    """An agent's own message with the thoughts that stand in it, as its model's template shows them to it.

    None if there are none, or the template does not show them again.
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


def recalls(chat: ChatFormat, entry: HandleEntry) -> bool:
    """Whether a model's template shows an agent its own earlier message with what it thought before it."""
    return chat.thoughts is not None and chat.thoughts.kept and "thoughts" in entry


def recalled(engine: Engine, entry: HandleEntry, words: BaseMessage | None) -> MessageHandle | PromptText:
    """An agent's own earlier message as its model's template shows it: with what it thought before it, or without.

    Args:
        engine: The agent's.
        entry: Of the message.
        words: Of it: where what was decoded is no more, or was edited, the thoughts that stand in them are to be
            encoded.
    """
    noted, model = entry.get("thoughts"), engine.model.adapter.fingerprint
    thought = None if noted is None else MessageHandle.model_validate(noted)
    # Another model's stand in its encodings, and do not go along.
    if recalls(engine.chat, entry) and (thought is None or thought.base_model == model):
        found = live_handle(engine, thought)
        said = None if words is None or found is not None else with_thinking(words, engine.chat)
        if (shown := found or said) is not None:
            return shown
    return handle_for(entry, model) or MessageHandle.model_validate(entry["handle"])


def opening_noted(agent: Thinker, state: Any) -> dict[str, str]:
    """How an agent's turn starts, for whoever encodes its words again."""
    if agent.assistant_prefix is not None:
        return {"header": agent.assistant_prefix}
    # Who may call tools starts without a name: others are told it where its words are a part of a turn.
    return {"speaker": agent.speaker(state)} | ({"header": ""} if agent.tools else {})


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """A message as others get it: without what was thought before it."""
    blocks = message.content if isinstance(message.content, list) else []
    left = [each for each in blocks if not (isinstance(each, dict) and each.get("type") in THOUGHT_BLOCKS)]
    if len(left) == len(blocks):
        return message
    is_text = all(isinstance(each, str) or each.get("type") == "text" for each in left)
    return message.model_copy(update={"content": str(message.text) if is_text else left})
