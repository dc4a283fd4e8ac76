"""One message in the pieces that it is shown in, which add up to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk

from choreo_agents.chat.shown_text import ShownText, shown_thoughts
from choreo_agents.engine import Thinking
from choreo_agents.models import FramedText, LoadedModel


class MessageChunks:
    """Of one message.

    Args:
        model: Which says it.
        thinking: How it thinks before.
        message_id: Of the message, and the `name` of who says it.
        stop: Texts that end it and are no part of it.
    """

    def __init__(
        self,
        model: LoadedModel,
        thinking: Thinking | None,
        message_id: str | None = None,
        name: str | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._said: dict[str, Any] = {"id": message_id, "name": name}
        turn_end = model.decode(model.encode(FramedText.frame(model.chat.turn_end)), special=False)
        self._words = ShownText(turn_end, stop)
        self._thoughts = shown_thoughts(thinking, model)

    def token(self, text: str) -> Iterator[AIMessageChunk]:
        """A piece of the message's text."""
        if piece := self._words.add(text):
            yield self._chunk(self._text(piece))

    def thought(self, text: str) -> Iterator[AIMessageChunk]:
        """A piece of what is thought before: reasoning, and no text."""
        if piece := self._thoughts.add(text):
            yield self._chunk(_reasoning(piece))

    def call(self, piece: ToolCallChunk) -> Iterator[AIMessageChunk]:
        """A piece of a call."""
        yield self._chunk("", tool_call_chunks=[piece])

    def last(self, message: AIMessage) -> Iterator[AIMessageChunk]:
        """What is left of the message; the last piece alone says how it ended and what it cost."""
        thoughts = "".join(
            str(block["reasoning"])
            for block in (message.content if isinstance(message.content, list) else [])
            if isinstance(block, dict) and block.get("type") == "reasoning"
        )
        if rest := self._thoughts.rest(thoughts):
            yield self._chunk(_reasoning(rest))
        yield self._chunk(
            self._text(self._words.rest(str(message.text))),
            response_metadata=dict(message.response_metadata),
            usage_metadata=message.usage_metadata,
            chunk_position="last",
        )

    def _text(self, piece: str) -> Any:
        return [{"type": "text", "text": piece, "index": 1}] if self._thoughts else piece

    def _chunk(self, content: Any, **more: Any) -> AIMessageChunk:
        return AIMessageChunk(content=content, **self._said, **more)


def _reasoning(piece: str) -> Any:
    return [{"type": "reasoning", "reasoning": piece, "index": 0}]
