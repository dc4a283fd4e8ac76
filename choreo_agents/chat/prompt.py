"""A call's messages as the tokens of one prompt, cut where other prompts may have begun alike.

    first turn | user's turn . . | . . 256 tokens each | the model's turn . . . . | user's turn | header of the answer

Where it is cut is told by the tokens alone: two prompts that begin with the same tokens are cut alike so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from langchain_core.messages import BaseMessage

from choreo_agents.chat.spans import spans_of
from choreo_agents.chat.turns import template_turns
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import FramedText, LoadedModel, tools_format

_MARK = "\u241f"
"""In a frame, where a name or an id stands in it."""
Piece = tuple[int, ...]
PIECE = 256
"""Tokens of a long turn that are encoded as one message, unless the model has said it."""


def whole_prompt(
    model: LoadedModel,
    messages: Sequence[BaseMessage],
    tools: Sequence[Mapping[str, Any]],
    header: FramedText,
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
        text = FramedText.joined([*(span.text for span in spans), header])
    return model.encode(text)


class PromptCutter:
    """Cuts prompts of one model.

    Args:
        model: Whose format says where turns begin.
    """

    def __init__(self, model: LoadedModel) -> None:
        chat, how = model.chat, tools_format(model.chat)
        own: list[str | FramedText] = [
            chat.start("assistant"),
            chat.header(None),
            chat.header(None, thinking=True),
            how.opening,
        ]
        self._bos = tuple(model.encode(FramedText.frame(chat.bos)))
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


def _by_first(model: LoadedModel, frames: Sequence[str | FramedText]) -> Mapping[int, Sequence[Piece]]:
    """Frames as tokens, by the first of them."""
    texts = (FramedText.frame(frame) if isinstance(frame, str) else frame for frame in frames)
    found: dict[int, list[Piece]] = {}
    for start in dict.fromkeys(tuple(model.encode(text)) for text in texts if text.text.strip()):
        found.setdefault(start[0], []).append(start)
    return found
