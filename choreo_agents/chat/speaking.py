"""What a decode says as it comes, and as a whole: words, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import ToolCallChunk

from choreo_agents.chat.speech import Speech
from choreo_agents.chat.tools import Described
from choreo_agents.engine import StreamedToken
from choreo_agents.models import LoadedModel, tools_format


@dataclass(frozen=True)
class Spoken:
    """One message."""

    words: str
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[InvalidToolCall] = field(default_factory=list)


class Listener(Protocol):
    """Who is shown what comes."""

    async def token(self, text: str, /) -> None:
        """A piece of the message's text."""
        ...

    async def thought(self, text: str, /) -> None:
        """A piece of what is thought before."""
        ...

    async def call(self, piece: ToolCallChunk, /) -> None:
        """A piece of a call."""
        ...


class Speaking:
    """Of one decode.

    Args:
        run: Is shown what comes.
        model: Whose tokens they are.
        tools: What the speaker may call; without any, all that it says is words.
        place: See `Speech`.
    """

    def __init__(self, run: Listener, model: LoadedModel, tools: Described, place: str) -> None:
        self._run = run
        self._model = model
        self._tools = tools
        self._place = place
        self._speech = Speech(model, tools, place) if tools else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a call's turn by themselves."""
        ends = tools_format(self._model.chat).ends if self._tools else ()
        return tuple(token for text in ends for token in self._model.encode(text)[:1])

    async def show(self, item: StreamedToken) -> None:
        """Show what the next token says."""
        if item.phase == "thoughts":
            if item.text:
                await self._run.thought(item.text)
        elif self._speech is not None and item.phase == "answer":
            await self._show(self._speech.add(item.token, item.text))
        elif item.text:
            await self._run.token(item.text)

    async def _show(self, pieces: Sequence[str | ToolCallChunk]) -> None:
        for piece in pieces:
            await (self._run.token(piece) if isinstance(piece, str) else self._run.call(piece))

    async def end(self, tokens: list[int]) -> Spoken:
        """The whole message, whose tokens behind its header these are."""
        if self._speech is not None:
            await self._show(self._speech.end())
            said = Speech.of(self._model, self._tools, self._place, _without_end(tokens, self._model))
            return Spoken(said.words, said.calls, said.broken)
        return Spoken(self._model.decode(_without_end(tokens, self._model), special=False).strip())


def _without_end(spoken: list[int], model: LoadedModel) -> list[int]:
    """A message's tokens before those that end its turn; what only looks like them was said."""
    ending = model.encode(model.chat.turn_end)
    return spoken[: -len(ending)] if ending and spoken[-len(ending) :] == ending else spoken
