"""How an answer starts, and what is thought before it, as a model's template has it."""

from __future__ import annotations

from dataclasses import replace

from choreo_agents.engine import Thinking
from choreo_agents.models import ChatFormat, FramedText, tools_format


def answer_header(chat: ChatFormat, name: str | None, *, thinks: bool, calls: bool) -> FramedText:
    """What the decode of an answer starts with.

    Args:
        chat: The model's.
        name: Who speaks. Not written before thoughts, nor by who may call: calls stand right behind the header.
        thinks: Whether thoughts come first.
        calls: Whether it may call tools.
    """
    if thinks:
        return chat.header(None, thinking=True)
    if calls:
        return FramedText.frame(_calling(chat)) if _calling(chat) else chat.header(None)
    return chat.header(name)


def thinking_before(chat: ChatFormat, name: str | None, budget: int, *, calls: bool) -> Thinking:
    """How a model thinks before such an answer; see `answer_header`.

    Args:
        budget: Tokens of thoughts at most.
    """
    if not calls:
        return Thinking.of(chat, name, budget)
    # Where a header says whether a call follows, or an answer, it is the model's to write.
    usual, opening = Thinking.of(chat, None, budget), FramedText.frame(_calling(chat))
    if not opening or chat.thoughts is None:
        return usual
    end = chat.thoughts.close.partition(opening.text)[0].strip()
    return replace(usual, end=end, before="", after=opening, answer=opening)


def _calling(chat: ChatFormat) -> str:
    """What a turn starts with where its header says whether it calls; empty where headers say nothing of it."""
    how = tools_format(chat)
    return how.opening if how.is_headed else ""
