"""Renders an agent's view as its model reads it, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from choreo_agents.models.chat.tool_prompt import TurnText, instructions, question
from choreo_agents.models.checking.talk import QUESTION, TalkTurn, View
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat.format import ChatFormat


@dataclass(frozen=True)
class ReadMessage:
    """A message of a view."""

    label: str
    pieces: tuple[PromptText, ...]
    """Texts that are encoded separately: text around the parts of a user's turn is apart from these."""

    @property
    def text(self) -> PromptText:
        """Text of the whole message."""
        return PromptText.joined(self.pieces)


def view_messages(chat: ChatFormat, view: View) -> list[ReadMessage]:
    """Return the messages of a view as a model reads them, without empty ones."""
    public, own = view.instructions or (None, None)
    before = chat.user.plain
    if public is None:
        out = _wrap("start", PromptText.special(chat.bos), PromptText.special(chat.default_system))
    else:
        first = instructions(public, chat, later=False)
        # It starts all agents' views; if it is in a user's turn, it opens that turn.
        opened, before = (before, "") if first.kind == "lead" else ("", before)
        out = _wrap("start", PromptText.special(chat.bos + opened) + first.text)
    texts = [] if own is None else [(f"{view.reader} is told", instructions(own, chat, later=True))]
    texts += [("question", question(QUESTION, chat)), *((turn.name, _write(turn, chat, view)) for turn in view.turns)]
    behind = [text.kind for _, text in texts[1:]]
    for (label, (text, kind)), follows in zip(texts, [*behind, "turn"], strict=True):
        if kind == "turn":
            out += _wrap(label, text)
        else:
            after, between = (chat.user.after, chat.user.plain) if follows == "turn" else ("", chat.merges or "")
            out += _wrap(label, PromptText.special(before), text, PromptText.special(after))
            before = between
    if view.open:
        out += _wrap("answer's header", chat.header(view.reader, thinking=_thinks(chat)))
    return out


def _thinks(chat: ChatFormat) -> bool:
    return chat.thoughts is not None and chat.thoughts.usual


def _write(turn: TalkTurn, chat: ChatFormat, view: View) -> TurnText:
    """Write a turn as an answer, or as a user's message where the edge encodes text again."""
    if chat.merges is not None and view.encodes_again and turn.name != view.reader:
        return question(turn.words, chat, turn.name)
    thoughts, opening = chat.thoughts, chat.assistant.opening(turn.name)
    if not _thinks(chat):
        blank = opening.text[len(opening.rstrip(" ").text) :]
        opening = chat.header(turn.name) + PromptText.special(blank)
    elif thoughts is not None and thoughts.kept and turn.name == view.reader:
        thought = PromptText.special(thoughts.header) + PromptText.plain(turn.thoughts)
        opening = thought + PromptText.special(thoughts.close) + PromptText.plain(f"{turn.name}: ")
    return TurnText(opening + PromptText.plain(turn.words) + PromptText.special(chat.turn_end))


def _wrap(label: str, *pieces: PromptText) -> list[ReadMessage]:
    """Return a list of one message; empty if it has no text."""
    contents = tuple(piece for piece in pieces if piece)
    return [ReadMessage(label, contents)] if contents else []
