"""Prompt of a chat-model call: one token sequence that is cut into pieces, or spans of text turn by turn.

    first turn | user's turn . . | . . 256 tokens each | the model's turn . . . . | user's turn | header of the answer

Cuts depend on tokens only: prompts with a common prefix are cut alike in it, so that their pieces are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, SystemMessage

from choreo_agents.chat.tools import own_turns
from choreo_agents.chat.turns import (
    UserTurn,
    message_turn,
    role_of,
    separator,
    template_turns,
    tools_called,
    words_in,
)
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText, TurnText, tools_format


class ChatSpan(NamedTuple):
    """A part of a prompt."""

    text: PromptText
    role: str
    """Role of its speaker; empty: template text between turns."""
    handle: MessageHandle | None = None
    """Encoded message that stands here in place of text."""


def spans_of(
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    chat: ChatFormat,
    parents: Sequence[MessageHandle | BaseMessage] = (),
) -> list[ChatSpan]:
    """Return the prompt of a call, without the header of its answer, as spans.

    Args:
        messages: The conversation. A leading system prompt and the tools come first.
        tools: Descriptions of the tools.
        chat: Chat format of the model.
        parents: Messages after the system prompt, each a turn of its own: handles as encoded, others as text.

    Raises:
        InvalidRequestError: A message holds more than text.
    """
    builder, remaining = _SpanBuilder(chat), list(messages)
    first = remaining.pop(0) if remaining and isinstance(remaining[0], SystemMessage) else None
    builder.add(PromptText.special(chat.bos), "")
    if first is None and not tools:
        builder.add(PromptText.special(chat.default_system), "")
    for turn in own_turns(None if first is None else words_in(first), tuple(tools), chat, later=False):
        builder.add_turn(turn, "system")
    for parent in parents:
        if isinstance(parent, BaseMessage):
            builder.add_turn(message_turn(parent, chat), role_of(parent))
        else:
            builder.close()
            builder.spans.append(ChatSpan(PromptText(), "assistant", parent))
    called = tools_called(messages)
    for message in remaining:
        builder.add_turn(message_turn(message, chat, called=called), role_of(message))
    builder.close()
    return builder.spans


class _SpanBuilder:
    """Builder of spans: joins consecutive user parts into one turn, for templates whose roles must alternate."""

    def __init__(self, chat: ChatFormat) -> None:
        self.spans: list[ChatSpan] = []
        self._chat = chat
        self._turn: UserTurn = "closed"

    def add(self, text: PromptText, role: str) -> None:
        """Append a span, unless it is empty."""
        self.spans += [ChatSpan(text, role)] if text else []

    def add_turn(self, turn: TurnText, role: str) -> None:
        """Append a turn, or a part of one."""
        before, self._turn = separator(self._turn, turn.kind, self._chat)
        self.add(PromptText.special(before), "")
        self.add(turn.text, role)

    def close(self) -> None:
        """Close a user's turn, if one is open."""
        self.add_turn(TurnText(PromptText()), "")


_MARK = "\u241f"
"""Placeholder for a name or an id in a template."""
Piece = tuple[int, ...]
PIECE = 256
"""Maximum number of tokens in a piece of a turn. Turns of the model stay whole, as they were decoded."""


def whole_prompt(
    model: LoadedModel,
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    header: PromptText,
    *,
    thinks: bool,
    effort: str | None = None,
) -> list[int]:
    """Return the tokens of a whole prompt, by the model's chat template if it can render it, else by our format.

    Args:
        model: Model that reads it.
        messages: The conversation.
        tools: Descriptions of the tools.
        header: Header of the answer, at the end.
        thinks: Whether the model is to think before it answers.
        effort: `reasoning_effort` for the template; None: not passed.

    Raises:
        InvalidRequestError: A message holds more than text, or `effort` changes nothing.
    """
    whole, text = model.chat.whole, None
    if whole is not None and (tools_format(model.chat).tell is not None or not tools):
        text = whole(template_turns(messages), tools, header, thinks=thinks, effort=effort)
    if text is None and effort is not None:
        raise InvalidRequestError(
            f"reasoning_effort={effort!r} has no effect in the model's chat template: leave it out, or limit thoughts "
            "with `thinking`"
        )
    if text is None:
        spans = spans_of(messages, tools, model.chat)
        text = PromptText.joined([*(span.text for span in spans), header])
    return model.encode(text)


class PromptCutter:
    """Cutter of one model's prompts into pieces that are encoded one by one.

    Args:
        model: Model whose chat format tells where turns begin.
    """

    def __init__(self, model: LoadedModel) -> None:
        chat, how = model.chat, tools_format(model.chat)
        headers = chat.header(None), chat.header(None, thinking=True)
        own: list[str | PromptText] = [chat.start("assistant"), *headers, how.opening]
        self._bos = tuple(model.encode(PromptText.special(chat.bos)))
        self._system = _by_first(model, [chat.start("system")])
        result = "" if how.result is None else how.result.before.partition(_MARK)[0]
        self._own = _by_first(model, own)
        self._starts = _by_first(model, [*own, chat.start("user"), chat.start("system"), result])

    def cut(self, tokens: Sequence[int], header: Sequence[int]) -> list[Piece]:
        """Return the pieces of a prompt, of which the last is the header of its answer.

        Args:
            tokens: Tokens of the prompt.
            header: Tokens of the header. If a token spans its start, the last token of the prompt takes its place.
        """
        tokens = tuple(tokens)
        has_header = bool(header) and tokens[-len(header) :] == tuple(header)
        end = len(tokens) - (len(header) if has_header else 1)
        return [*self.pieces(tokens[:end]), tokens[end:]]

    def pieces(self, tokens: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of a prompt without a header, which may be empty."""
        tokens = tuple(tokens)
        starts = [index for index in range(1, len(tokens)) if _begins(self._starts, tokens, index)]
        if starts and tokens[: starts[0]] == self._bos and _begins(self._system, tokens, starts[0]):
            del starts[0]  # graphs encode BOS and system prompt as one root, too: both share its KV
        for start, end in pairwise([0, *starts, len(tokens)] if tokens else []):
            size = end - start if _begins(self._own, tokens, start) else PIECE
            yield from (tokens[at : min(at + size, end)] for at in range(start, end, size))


def _begins(starts: Mapping[int, Sequence[Piece]], tokens: Piece, at: int) -> bool:
    return any(tokens[at : at + len(start)] == start for start in starts.get(tokens[at], ()))


def _by_first(model: LoadedModel, frames: Sequence[str | PromptText]) -> Mapping[int, Sequence[Piece]]:
    """Return the token sequences of turn openings, grouped by first token."""
    texts = (PromptText.special(frame) if isinstance(frame, str) else frame for frame in frames)
    by_token: dict[int, list[Piece]] = {}
    for start in dict.fromkeys(tuple(model.encode(text)) for text in texts if text.text.strip()):
        by_token.setdefault(start[0], []).append(start)
    return by_token
