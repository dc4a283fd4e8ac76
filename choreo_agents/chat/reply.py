"""What a decode has said, as a chat message: words, thoughts and calls, what it cost, and why it ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from langchain_core.messages import AIMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from choreo_agents.chat.logprobs import said_tokens
from choreo_agents.chat.speaking import Spoken
from choreo_agents.engine import Engine
from choreo_agents.kv.handle import MessageHandle


class Reasoned(NamedTuple):
    """What was thought before a message."""

    words: str
    tokens: int


def reply(
    engine: Engine,
    handle: MessageHandle,
    spoken: Spoken,
    reasoned: Reasoned,
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
        reasoned: What was thought before, which stands in a block of its own.
        read: Tokens of its view.
        header: Tokens that its decode started with.
        most: Tokens that it may have sampled at most: what it was made to say beside is not counted.
        metadata: Of the response, beside the model's name and why it ended.
        said: Other fields of the message.
    """
    content: Any = spoken.words
    if reasoned.words:
        content = [{"type": "reasoning", "reasoning": reasoned.words}]
        content += [{"type": "text", "text": spoken.words}] if spoken.words or not spoken.calls else []
    made = reasoned.tokens + len(said_tokens(engine, handle))
    output = made if most is None else min(made, most)
    usage = UsageMetadata(
        input_tokens=read + header,
        output_tokens=output,
        total_tokens=read + header + output,
        input_token_details=InputTokenDetails(cache_read=engine.usage(handle).tokens_reused),
    )
    if reasoned.tokens:
        usage["output_token_details"] = OutputTokenDetails(reasoning=min(reasoned.tokens, output))
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


def _ended(reason: str | None, spoken: Spoken) -> str:
    """Why a message has ended, as chat models say it: one that was cut is cut, whatever it calls."""
    return "length" if reason == "length" else "tool_calls" if spoken.calls else "stop"
