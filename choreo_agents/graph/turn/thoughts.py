"""What an agent thinks before it speaks: its own, and no part of what others get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents.engine import Engine, Thinking
from choreo_agents.engine.decoding.thoughts import PhaseTexts
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.turn.streaming import shown_thoughts
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, FramedText

Thinks = bool | int | None
"""Whether an agent thinks before it speaks, or for how many tokens at most; None: as its model's template has it."""


class Thinker(Protocol):
    """What is asked of an agent that may think."""

    name: str
    header: str | None
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
        return Thinking.of(chat, agent.speaker(state), budget)
    lead = FramedText.frame(agent.header)
    usual = Thinking.of(chat, None, budget)
    return replace(usual, answer=chat.assistant.opening(None) + lead, after=usual.after + lead)


def header_of(agent: Thinker, state: Any, chat: ChatFormat) -> FramedText:
    """What a decode of an agent starts with."""
    if thinks(agent, chat):
        return chat.header(None, thinking=True)
    if agent.header is None:
        return chat.header(agent.speaker(state), thinking=False)
    opening, bare = chat.assistant.opening(None), chat.header(None)
    # The space before the first word stays before a header of its own.
    return (opening if bare == opening.rstrip(" ") else bare) + FramedText.frame(agent.header)


def recalled(engine: Engine, handle: MessageHandle, author: str) -> MessageHandle:
    """An agent's own earlier message as its model's template shows it: with what it thought before it, or without."""
    thoughts = engine.chat.thoughts
    found = engine.inspect.thoughts(handle, author) if thoughts is not None and thoughts.kept else ()
    return found[-1] if found else handle


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """A message as others get it: without a reasoning block."""
    blocks = message.content if isinstance(message.content, list) else []
    if not any(isinstance(block, dict) and block.get("type") == "reasoning" for block in blocks):
        return message
    return message.model_copy(update={"content": str(message.text)})


def thought_before(engine: Engine, handle: MessageHandle, author: str, thinking: Thinking | None) -> tuple[str, int]:
    """What an author thought before a message, and in how many tokens: nothing, if it was said without thinking.

    In the words that a stream of them adds up to.

    Others may have come to the same words in the same place: what they thought is theirs.
    """
    found = engine.inspect.thoughts(handle, author)
    if not found or thinking is None:
        return "", 0
    *_, made = engine.inspect.records([found[-1]])
    assert made.sampled is not None
    sampled = list(made.tokens[slice(*made.sampled)])
    texts, shown = PhaseTexts(engine.model, thinking), shown_thoughts(thinking)
    said = (text for phase, text in map(texts.add, sampled) if phase == "thoughts")
    return "".join(map(shown.add, said)), len(sampled) - len(engine.logprobs(handle))
