"""Renders an agent's view as its model is fed with it, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from choreo_agents.models.chat import TurnText, instructions, question
from choreo_agents.models.checking.talk import QUESTION, TalkTurn, View
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat


@dataclass(frozen=True)
class ReadMessage:
    """A message of a view."""

    label: str
    pieces: tuple[PromptText, ...]
    """Each tokens of its own: what stands around the parts of a user's turn is encoded apart from them."""

    @property
    def text(self) -> PromptText:
        """All of it."""
        return reduce(add, self.pieces, PromptText())


class Rendering:
    """One view of one model.

    Args:
        chat: How the model writes turns.
        view: What is read.
    """

    def __init__(self, chat: ChatFormat, view: View) -> None:
        self.chat = chat
        self.view = view
        self.thinks = chat.thoughts is not None and chat.thoughts.usual

    def messages(self) -> list[ReadMessage]:
        """It, message by message."""
        chat, reader = self.chat, self.view.reader
        public, own = self.view.instructions or (None, None)
        before = chat.user.plain
        if public is None:
            read = _read("start", PromptText.special(chat.bos), PromptText.special(chat.default_system))
        else:
            first = instructions(public, chat, later=False)
            # All agents' views begin with it, and with that the user's turn, if it stands in one.
            opened, before = (before, "") if first.kind == "lead" else ("", before)
            read = _read("start", PromptText.special(chat.bos + opened) + first.text)
        said = [] if own is None else [(f"{reader} is told", instructions(own, chat, later=True))]
        said += [("question", question(QUESTION, chat)), *((turn.name, self._said(turn)) for turn in self.view.said)]
        behind = [each.kind for _, each in said[1:]]
        for (label, (text, kind)), follows in zip(said, [*behind, "turn"], strict=True):
            if kind == "turn":
                read += _read(label, text)
            else:
                after, between = (chat.user.after, chat.user.plain) if follows == "turn" else ("", chat.merges or "")
                read += _read(label, PromptText.special(before), text, PromptText.special(after))
                before = between
        return [*read, *_read("answer's header", chat.header(reader, thinking=self.thinks))] if self.view.open else read

    def _said(self, said: TalkTurn) -> TurnText:
        """An answer, or what is said among what the reader is told."""
        if self.chat.merges is None or not self.view.encodes_again or said.name == self.view.reader:
            return TurnText(self._answer(said))
        return question(said.words, self.chat, said.name)

    def _answer(self, said: TalkTurn) -> PromptText:
        chat, thoughts = self.chat, self.chat.thoughts
        opening = chat.assistant.opening(said.name)
        if thoughts is not None and thoughts.kept and self.thinks and said.name == self.view.reader:
            thought = PromptText.special(thoughts.header) + PromptText.plain(said.thoughts)
            opening = thought + PromptText.special(thoughts.close) + PromptText.plain(f"{said.name}: ")
        elif not self.thinks:
            blank = opening.text[len(opening.rstrip(" ").text) :]
            opening = chat.header(said.name) + PromptText.special(blank)
        return opening + PromptText.plain(said.words) + PromptText.special(chat.turn_end)


def _read(label: str, *pieces: PromptText) -> list[ReadMessage]:
    """A message, if there is anything in it."""
    said = tuple(piece for piece in pieces if piece)
    return [ReadMessage(label, said)] if said else []
