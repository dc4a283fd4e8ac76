"""Renders an agent's view as its model reads it, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
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
        return reduce(add, self.pieces, PromptText())


class ViewRenderer:
    """A renderer of one view for one model.

    Args:
        chat: The model's chat format.
        view: The view.
    """

    def __init__(self, chat: ChatFormat, view: View) -> None:
        self.chat = chat
        self.view = view
        self.thinks = chat.thoughts is not None and chat.thoughts.usual

    def messages(self) -> list[ReadMessage]:
        """Return the messages of the view, without empty ones."""
        chat, reader = self.chat, self.view.reader
        public, own = self.view.instructions or (None, None)
        before = chat.user.plain
        if public is None:
            out = _wrap("start", PromptText.special(chat.bos), PromptText.special(chat.default_system))
        else:
            first = instructions(public, chat, later=False)
            # It starts all agents' views; if it is in a user's turn, it opens that turn.
            opened, before = (before, "") if first.kind == "lead" else ("", before)
            out = _wrap("start", PromptText.special(chat.bos + opened) + first.text)
        texts = [] if own is None else [(f"{reader} is told", instructions(own, chat, later=True))]
        texts += [("question", question(QUESTION, chat)), *((turn.name, self._write(turn)) for turn in self.view.turns)]
        behind = [text.kind for _, text in texts[1:]]
        for (label, (text, kind)), follows in zip(texts, [*behind, "turn"], strict=True):
            if kind == "turn":
                out += _wrap(label, text)
            else:
                after, between = (chat.user.after, chat.user.plain) if follows == "turn" else ("", chat.merges or "")
                out += _wrap(label, PromptText.special(before), text, PromptText.special(after))
                before = between
        return [*out, *_wrap("answer's header", chat.header(reader, thinking=self.thinks))] if self.view.open else out

    def _write(self, turn: TalkTurn) -> TurnText:
        """Write a turn as an answer, or as a user's message where the edge encodes text again."""
        if self.chat.merges is None or not self.view.encodes_again or turn.name == self.view.reader:
            return TurnText(self._write_answer(turn))
        return question(turn.words, self.chat, turn.name)

    def _write_answer(self, turn: TalkTurn) -> PromptText:
        chat, thoughts = self.chat, self.chat.thoughts
        opening = chat.assistant.opening(turn.name)
        if thoughts is not None and thoughts.kept and self.thinks and turn.name == self.view.reader:
            thought = PromptText.special(thoughts.header) + PromptText.plain(turn.thoughts)
            opening = thought + PromptText.special(thoughts.close) + PromptText.plain(f"{turn.name}: ")
        elif not self.thinks:
            blank = opening.text[len(opening.rstrip(" ").text) :]
            opening = chat.header(turn.name) + PromptText.special(blank)
        return opening + PromptText.plain(turn.words) + PromptText.special(chat.turn_end)


def _wrap(label: str, *pieces: PromptText) -> list[ReadMessage]:
    """Return a list of one message; empty if it has no text."""
    contents = tuple(piece for piece in pieces if piece)
    return [ReadMessage(label, contents)] if contents else []
