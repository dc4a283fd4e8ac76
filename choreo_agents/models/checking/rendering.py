"""Renders an agent's view as its model is fed with it, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from choreo_agents.models.checking.talk import QUESTION, TalkTurn, View
from choreo_agents.models.framed import FramedText

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat

_Part = tuple[str, FramedText]
"""Author and text of a part of a user's turn."""


@dataclass(frozen=True)
class ReadMessage:
    """A message of a view."""

    label: str
    pieces: tuple[FramedText, ...]
    """Each tokens of its own: what stands around the parts of a user's turn is encoded apart from them."""

    @property
    def text(self) -> FramedText:
        """All of it."""
        return reduce(add, self.pieces, FramedText())


class Rendering:
    """One view of one model.

    Args:
        chat: How the model writes turns.
        view: What is read.
    """

    def __init__(self, chat: ChatFormat, view: View) -> None:
        self.chat = chat
        self.view = view
        self.merges = chat.merges is not None and view.encodes_again
        self.thinks = chat.thoughts is not None and chat.thoughts.usual

    def messages(self) -> list[ReadMessage]:
        """It, message by message."""
        chat, reader = self.chat, self.view.reader
        public, own = self.view.instructions or (None, None)
        started = FramedText.frame(chat.bos), FramedText.frame(chat.default_system)
        before = chat.user.plain
        if public is not None and not chat.leads:
            started = chat.root(public), FramedText()
        elif public is not None:
            # All agents' views begin with it, and with that the user's turn.
            begun = FramedText.frame(chat.bos + before) + chat.system.around(public)
            started, before = (begun, FramedText()), ""
        read = _read("start", *started)
        told: list[_Part] = []
        if own is not None and chat.merges is not None and (chat.leads or chat.later is None):
            told = [(f"{reader} is told", chat.part(own))]
        elif own is not None:
            read += _read(f"{reader} is told", chat.turn("system", own, later=True))
        question, *others = self._turns()
        assert not isinstance(question, TalkTurn)
        read += self._user_turn([*told, *question], before)
        for turn in others:
            if isinstance(turn, TalkTurn):
                read += _read(turn.name, self._answer(turn))
            else:
                read += self._user_turn(turn, chat.user.plain)
        return [*read, *_read("answer's header", chat.header(reader, thinking=self.thinks))] if self.view.open else read

    def _turns(self) -> list[list[_Part] | TalkTurn]:
        """The parts of each user's turn, and answers."""
        turns: list[list[_Part] | TalkTurn] = [[("question", self.chat.part(QUESTION))]]
        for said in self.view.said:
            behind = turns[-1]
            if not self.merges or said.name == self.view.reader:
                turns.append(said)
            elif isinstance(behind, TalkTurn):
                turns.append([(said.name, self.chat.part(said.words, said.name))])
            else:
                behind.append((said.name, self.chat.part(said.words, said.name)))
        return turns

    def _user_turn(self, parts: list[_Part], before: str) -> list[ReadMessage]:
        read, after = list[ReadMessage](), FramedText.frame(self.chat.user.after)
        if self.chat.merges is None:
            [(label, part)] = parts
            return _read(label, FramedText.frame(before) + part + after)
        for number, (label, part) in enumerate(parts, start=1):
            read += _read(label, FramedText.frame(before), part, after if number == len(parts) else FramedText())
            before = self.chat.merges
        return read

    def _answer(self, said: TalkTurn) -> FramedText:
        chat, thoughts = self.chat, self.chat.thoughts
        opening = chat.assistant.opening(said.name)
        if thoughts is not None and thoughts.kept and self.thinks and said.name == self.view.reader:
            thought = FramedText.frame(thoughts.header) + FramedText.words(said.thoughts)
            opening = thought + FramedText.frame(thoughts.close) + FramedText.words(f"{said.name}: ")
        elif not self.thinks:
            blank = opening.text[len(opening.rstrip(" ").text) :]
            opening = chat.header(said.name) + FramedText.frame(blank)
        return opening + FramedText.words(said.words) + FramedText.frame(chat.turn_end)


def _read(label: str, *pieces: FramedText) -> list[ReadMessage]:
    """A message, if there is anything in it."""
    said = tuple(piece for piece in pieces if piece)
    return [ReadMessage(label, said)] if said else []
