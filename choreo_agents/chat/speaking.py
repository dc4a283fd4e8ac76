"""What a decode says as it comes, and as a whole: words, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from langchain_core.messages import AIMessageChunk, InvalidToolCall, ToolCall

from choreo_agents.chat.chunks import MessageChunks
from choreo_agents.chat.speech import Called, Speech, require_names
from choreo_agents.chat.tools import Described
from choreo_agents.chat.ways import CallsOrAnswer
from choreo_agents.engine import StreamedToken
from choreo_agents.models import LoadedModel, tools_format


@dataclass(frozen=True)
class Spoken:
    """One message."""

    words: str
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[InvalidToolCall] = field(default_factory=list)

    def cut(self, cut: Callable[[str], str]) -> Spoken:
        """The same with fewer words."""
        return replace(self, words=cut(self.words))


class Speaking:
    """Of one decode.

    Args:
        chunks: Of the message.
        model: Whose tokens they are.
        tools: What the speaker may call; without any, all that it says is words.
        place: See `Speech`.
        ways: Makes what tells calls from an answer in a form; None: nothing has to.

    Raises:
        InvalidRequestError: A tool has a name that the model cannot write.
    """

    def __init__(
        self,
        chunks: MessageChunks,
        model: LoadedModel,
        tools: Described,
        place: str,
        ways: Callable[[], CallsOrAnswer] | None = None,
    ) -> None:
        self._chunks = chunks
        self._model = model
        self._tools = tools
        self._place = place
        self._ways: Callable[[], CallsOrAnswer | None] = ways or (lambda: None)
        require_names(model, tools)
        self._speech = Speech(model, tools, place, self._ways()) if tools else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a call's turn by themselves."""
        ends = tools_format(self._model.chat).ends if self._tools else ()
        return tuple(token for text in ends for token in self._model.encode(text)[:1])

    @property
    def in_parts(self) -> bool:
        """Tell whether a turn may have several messages: a preamble, then a call."""
        how = tools_format(self._model.chat)
        return bool(self._tools) and how.is_headed and bool(how.ends)

    def hear(self, item: StreamedToken) -> Iterator[AIMessageChunk]:
        """What the next token says."""
        if item.phase == "thoughts":
            yield from self._chunks.thought(item.text)
        elif self._speech is not None and item.phase == "answer":
            yield from self._heard(self._speech.add(item.token))
        else:
            yield from self._chunks.token(item.text)

    def rest(self) -> Iterator[AIMessageChunk]:
        """What is left of calls when nothing follows."""
        yield from self._heard([] if self._speech is None else self._speech.end())

    def _heard(self, pieces: Sequence[str | Called]) -> Iterator[AIMessageChunk]:
        for piece in pieces:
            yield from self._chunks.token(piece) if isinstance(piece, str) else self._chunks.call(piece)

    def said(self, tokens: Sequence[int]) -> Spoken:
        """The whole message, whose tokens behind its header these are."""
        spoken = _without_end(list(tokens), self._model)
        if self._speech is None:
            return Spoken(self._model.decode(spoken, special=False).strip())
        said = Speech(self._model, self._tools, self._place, self._ways()).whole(spoken)
        calls = [call for call in said.calls if call["type"] == "tool_call"]
        broken = [call for call in said.calls if call["type"] == "invalid_tool_call"]
        return Spoken(said.words, calls, broken)


def _without_end(spoken: list[int], model: LoadedModel) -> list[int]:
    """A message's tokens before those that end its turn; what only looks like them was said."""
    ending = model.encode(model.chat.turn_end)
    return spoken[: -len(ending)] if ending and spoken[-len(ending) :] == ending else spoken
