"""One message in the pieces that it is shown in, which add up to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk

from choreo_agents.chat.shown_text import ShownText, shown_thoughts
from choreo_agents.chat.speech import Called
from choreo_agents.engine import Thinking
from choreo_agents.models import FramedText, LoadedModel
from choreo_agents.models.chat.tools.literals import to_json


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
        self._called: dict[str | None, bool] = {}
        """Calls that were shown, by their ids; whether they can be made."""

    def token(self, text: str) -> Iterator[AIMessageChunk]:
        """A piece of the message's text."""
        if piece := self._words.add(text):
            yield self._chunk(self._text(piece))

    def thought(self, text: str) -> Iterator[AIMessageChunk]:
        """A piece of what is thought before: reasoning, and no text."""
        if piece := self._thoughts.add(text):
            yield self._chunk(_reasoning(piece))

    def call(self, call: Called) -> Iterator[AIMessageChunk]:
        """A whole call, once."""
        if call["id"] in self._called:
            return
        # What has no number is never joined to anything.
        number = sum(self._called.values()) if call["type"] == "tool_call" else None
        self._called[call["id"]] = number is not None
        args = call["args"] if isinstance(call["args"], str) else to_json(call["args"])
        yield self._chunk(
            "", tool_call_chunks=[tool_call_chunk(name=call["name"], args=args, id=call["id"], index=number)]
        )

    def last(self, message: AIMessage) -> Iterator[AIMessageChunk]:
        """What is left of the message; the last piece alone says how it ended and what it cost."""
        thoughts = "".join(
            str(block["reasoning"])
            for block in (message.content if isinstance(message.content, list) else [])
            if isinstance(block, dict) and block.get("type") == "reasoning"
        )
        if rest := self._thoughts.rest(thoughts):
            yield self._chunk(_reasoning(rest))
        calls: list[Called] = [*message.tool_calls, *message.invalid_tool_calls]
        for call in calls:
            yield from self.call(call)
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
