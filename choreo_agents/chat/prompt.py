"""A call's messages as the tokens of one prompt, or as spans: a conversation put together turn by turn.

    first turn | user's turn . . | . . 256 tokens each | the model's turn . . . . | user's turn | header of the answer

Where a prompt is cut is told by its tokens alone: two that begin with the same tokens are cut alike so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, SystemMessage

from choreo_agents.chat.tools import own_turns
from choreo_agents.chat.turns import message_turn, role_of, template_turns, tools_called, words_in
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText, TurnText, tools_format


class ChatSpan(NamedTuple):
    """A part of a conversation."""

    text: PromptText
    role: str
    """Of who says it; empty: it is what stands around turns, and nobody's."""
    handle: MessageHandle | None = None
    """Of a message that is read as it was encoded, in the place of a text."""


def spans_of(
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    chat: ChatFormat,
    parents: Sequence[MessageHandle | BaseMessage] = (),
) -> list[ChatSpan]:
    """All that a model reads before the header of its answer.

    Args:
        messages: Of the conversation. Instructions that come first, and tools, are told first.
        tools: Descriptions of those that the model may call.
        chat: The model's.
        parents: Messages that are read behind those instructions, each a turn of its own: as they were encoded, or in
            their words.

    Raises:
        InvalidRequestError: A message holds more than text.
    """
    laid, rest = _Laying(chat), list(messages)
    first = rest.pop(0) if rest and isinstance(rest[0], SystemMessage) else None
    laid.add(PromptText.special(chat.bos), "")
    if first is None and not tools:
        laid.add(PromptText.special(chat.default_system), "")
    for said in own_turns(None if first is None else words_in(first), tuple(tools), chat, later=False):
        laid.say(said, "system")
    for parent in parents:
        if isinstance(parent, BaseMessage):
            laid.say(message_turn(parent, chat), role_of(parent))
        else:
            laid.close()
            laid.spans.append(ChatSpan(PromptText(), "assistant", parent))
    called = tools_called(messages)
    for message in rest:
        laid.say(message_turn(message, chat, called=called), role_of(message))
    laid.close()
    return laid.spans


class _Laying:
    """Puts parts of a user's turn into one, where users and model must take turns."""

    def __init__(self, chat: ChatFormat) -> None:
        self.spans: list[ChatSpan] = []
        self._chat = chat
        self._is_open = self._has_part = False

    def add(self, text: PromptText, role: str) -> None:
        """Append a span, if it says anything."""
        self.spans += [ChatSpan(text, role)] if text else []

    def say(self, said: TurnText, role: str) -> None:
        """Append a turn, or a part of one."""
        if said.kind == "turn":
            self.close()
        elif not self._is_open:
            self._around(self._chat.user.plain)
        elif self._has_part:
            self._around(self._chat.merges or "")
        self._is_open = said.kind != "turn"
        self._has_part = said.kind == "part"
        self.add(said.text, role)

    def close(self) -> None:
        """Close a user's turn, if one is open."""
        if self._is_open:
            self._around(self._chat.user.after)
        self._is_open = self._has_part = False

    def _around(self, text: str) -> None:
        self.add(PromptText.special(text), "")


_MARK = "\u241f"
"""In a frame, where a name or an id stands in it."""
Piece = tuple[int, ...]
PIECE = 256
"""Tokens of a long turn that are encoded as one message, unless the model has said it."""


def whole_prompt(
    model: LoadedModel,
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    header: PromptText,
    *,
    thinks: bool,
    effort: str | None = None,
) -> list[int]:
    """All that a model reads before it answers, encoded as one text.

    Args:
        model: Which reads it.
        messages: Of the conversation.
        tools: Descriptions of those that it may call.
        header: What its answer starts with, at the end.
        thinks: Whether it is to think before it answers.
        effort: How hard, in the words of its template; None: nothing is said of it.

    Raises:
        InvalidRequestError: A message holds more than text, or an effort changes nothing.
    """
    whole, text = model.chat.whole, None
    if whole is not None and (tools_format(model.chat).tell is not None or not tools):
        text = whole(template_turns(messages), tools, header, thinks=thinks, effort=effort)
    if text is None and effort is not None:
        raise InvalidRequestError(
            f"reasoning_effort={effort!r} changes nothing in what the model's chat template writes: leave it out, or "
            "bound its thoughts by `thinking`"
        )
    if text is None:
        spans = spans_of(messages, tools, model.chat)
        text = PromptText.joined([*(span.text for span in spans), header])
    return model.encode(text)


class PromptCutter:
    """Cuts prompts of one model.

    Args:
        model: Whose format says where turns begin.
    """

    def __init__(self, model: LoadedModel) -> None:
        chat, how = model.chat, tools_format(model.chat)
        own: list[str | PromptText] = [
            chat.start("assistant"),
            chat.header(None),
            chat.header(None, thinking=True),
            how.opening,
        ]
        self._bos = tuple(model.encode(PromptText.special(chat.bos)))
        self._system = _by_first(model, [chat.start("system")])
        result = "" if how.result is None else how.result.before.partition(_MARK)[0]
        self._own = _by_first(model, own)
        self._starts = _by_first(model, [*own, chat.start("user"), chat.start("system"), result])

    def cut(self, tokens: Sequence[int], header: Sequence[int]) -> list[Piece]:
        """The pieces of a prompt, of which the last is the header of its answer.

        Args:
            tokens: Of the prompt.
            header: With which it ends, unless tokens are joined across its start: then its last token takes its place.
        """
        tokens = tuple(tokens)
        ended = bool(header) and tokens[-len(header) :] == tuple(header)
        end = len(tokens) - (len(header) if ended else 1)
        return [*self.pieces(tokens[:end]), tokens[end:]]

    def pieces(self, tokens: Sequence[int]) -> Iterator[Piece]:
        """Those of a text without a header, which may be empty."""
        tokens = tuple(tokens)
        starts = [at for at in range(1, len(tokens)) if _begins(self._starts, tokens, at)]
        if starts and tokens[: starts[0]] == self._bos and _begins(self._system, tokens, starts[0]):
            del starts[0]  # instructions stand with it in a graph's root, too, and one finds what the other has encoded
        for start, end in pairwise([0, *starts, len(tokens)] if tokens else []):
            size = end - start if _begins(self._own, tokens, start) else PIECE
            yield from (tokens[at : min(at + size, end)] for at in range(start, end, size))


def _begins(starts: Mapping[int, Sequence[Piece]], tokens: Piece, at: int) -> bool:
    return any(tokens[at : at + len(start)] == start for start in starts.get(tokens[at], ()))


def _by_first(model: LoadedModel, frames: Sequence[str | PromptText]) -> Mapping[int, Sequence[Piece]]:
    """Frames as tokens, by the first of them."""
    texts = (PromptText.special(frame) if isinstance(frame, str) else frame for frame in frames)
    found: dict[int, list[Piece]] = {}
    for start in dict.fromkeys(tuple(model.encode(text)) for text in texts if text.text.strip()):
        found.setdefault(start[0], []).append(start)
    return found
