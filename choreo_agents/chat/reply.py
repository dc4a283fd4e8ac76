"""What a decode has said, as a chat message: words, thoughts and calls, what it cost, and why it ended."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from choreo_agents.chat.logprobs import said_tokens
from choreo_agents.chat.shown_text import shown_thoughts
from choreo_agents.chat.speaking import Spoken
from choreo_agents.engine import Engine, Thinking
from choreo_agents.engine.decoding.thoughts import PhaseTexts
from choreo_agents.kv.handle import MessageHandle


def reply(
    engine: Engine,
    handle: MessageHandle,
    spoken: Spoken,
    thought: MessageHandle | None,
    thinking: Thinking | None,
    *,
    read: int,
    header: int,
    most: int | None = None,
    metadata: dict[str, Any] | None = None,
    **said: Any,
) -> AIMessage:
    """The message that a decode has made.

    Args:
        engine: Which has made it.
        handle: Of the message.
        spoken: What it says.
        thought: What was decoded, thoughts and answer; None: it was said without thinking. Thoughts get a block of
            their own.
        thinking: How its speaker thought.
        read: Tokens of its view.
        header: Tokens that its decode started with.
        most: Tokens that it may have sampled at most: what it was made to say beside is not counted.
        metadata: Of the response, beside the model's name and why it ended.
        said: Other fields of the message.
    """
    content: Any = spoken.words
    thoughts, reasoning = (
        ("", 0) if thought is None or thinking is None else _thoughts(engine, thought, handle, thinking)
    )
    if thoughts:
        content = [{"type": "reasoning", "reasoning": thoughts}]
        content += [{"type": "text", "text": spoken.words}] if spoken.words or not spoken.calls else []
    made = reasoning + len(said_tokens(engine, handle))
    output = made if most is None else min(made, most)
    usage = UsageMetadata(
        input_tokens=read + header,
        output_tokens=output,
        total_tokens=read + header + output,
        input_token_details=InputTokenDetails(cache_read=engine.usage(handle).tokens_reused),
    )
    if reasoning:
        usage["output_token_details"] = OutputTokenDetails(reasoning=min(reasoning, output))
    return AIMessage(
        content=content,
        tool_calls=spoken.calls,
        invalid_tool_calls=spoken.broken,
        response_metadata={
            "model_name": engine.model.name,
            "finish_reason": _ended(engine.inspect.finish_reason(handle), spoken),
            **(metadata or {}),
        },
        usage_metadata=usage,
        **said,
    )


def _thoughts(engine: Engine, thought: MessageHandle, handle: MessageHandle, thinking: Thinking) -> tuple[str, int]:
    """What was thought before a message, in the words that a stream of them adds up to, and its length in tokens."""
    *_, made = engine.inspect.records([thought])
    assert made.sampled is not None
    sampled = list(made.tokens[slice(*made.sampled)])
    texts, shown = PhaseTexts(engine.model, thinking), shown_thoughts(thinking, engine.model)
    said = (text for phase, text in map(texts.add, sampled) if phase == "thoughts")
    return "".join(map(shown.add, said)), len(sampled) - len(engine.logprobs(handle))


def _ended(reason: str | None, spoken: Spoken) -> str:
    """Why a message has ended, as chat models say it: one that was cut is cut, whatever it calls."""
    return "length" if reason == "length" else "tool_calls" if spoken.calls else "stop"
