"""What an agent thinks before it speaks: its own, and no part of what others get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents.chat import THOUGHT_BLOCKS, Described, answer_header, thinking_before
from choreo_agents.engine import Engine, Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.by_model import handle_for
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.words.entries import known_handle
from choreo_agents.graph.words.inputs import thought_out
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, FramedText

Thinks = bool | int | None
"""Whether an agent thinks before it speaks, or for how many tokens at most; None: as its model's template has it."""


class Thinker(Protocol):
    """What is asked of an agent that may think."""

    name: str
    header: str | None
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
    if agent.header is None:
        return thinking_before(chat, agent.speaker(state), budget, calls=bool(agent.tools))
    lead = FramedText.frame(agent.header)
    usual = Thinking.of(chat, None, budget)
    return replace(usual, answer=chat.assistant.opening(None) + lead, after=usual.after + lead)


def header_of(agent: Thinker, state: Any, chat: ChatFormat) -> FramedText:
    """What a decode of an agent starts with."""
    if agent.header is None or thinks(agent, chat):
        return answer_header(chat, agent.speaker(state), thinks=thinks(agent, chat), calls=bool(agent.tools))
    opening, bare = chat.assistant.opening(None), chat.header(None)
    # The space before the first word stays before a header of its own.
    return (opening if bare == opening.rstrip(" ") else bare) + FramedText.frame(agent.header)


def recalls(chat: ChatFormat, entry: HandleEntry) -> bool:
    """Whether a model's template shows an agent its own earlier message with what it thought before it."""
    return chat.thoughts is not None and chat.thoughts.kept and "thoughts" in entry


def recalled(engine: Engine, entry: HandleEntry, words: BaseMessage | None) -> MessageHandle | FramedText:
    """An agent's own earlier message as its model's template shows it: with what it thought before it, or without.

    Args:
        engine: The agent's.
        entry: Of the message.
        words: Of it: where what was decoded is no more, or was edited, the thoughts that stand in them are to be
            encoded.
    """
    if recalls(engine.chat, entry) and not _is_anothers(entry.get("thoughts"), engine):
        noted = entry.get("thoughts")
        found = None if noted is None else known_handle(engine, MessageHandle.model_validate(noted))
        said = None if words is None or found is not None else thought_out(words, engine.chat)
        if (shown := found or said) is not None:
            return shown
    own = handle_for(entry, engine.model.adapter.fingerprint)
    return own or MessageHandle.model_validate(entry["handle"])


def _is_anothers(noted: Mapping[str, Any] | None, engine: Engine) -> bool:
    """Whether thoughts are another model's: they stand in its encodings, and do not go along."""
    return noted is not None and MessageHandle.model_validate(noted).base_model != engine.model.adapter.fingerprint


def opening_of(agent: Thinker, state: Any) -> dict[str, str]:
    """How an agent's turn starts, for whoever encodes its words again."""
    if agent.header is not None:
        return {"header": agent.header}
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
