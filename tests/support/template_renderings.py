"""What an agent reads, written as a chat template has it in one respect or another, and why it is not fed so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Literal

from choreo_agents.models.checking.rendering import ReadMessage
from choreo_agents.models.checking.talk import QUESTION, SEPARATOR, TalkTurn, View
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat.format import ChatFormat

_Part = tuple[str, PromptText, str]
"""Of a user's turn: whose, what, and what stands before the next part."""


class Reason(Enum):
    """Of a difference; the value says it in a sentence."""

    NAMES = "the template has no names: they are the first words of a turn"
    HEADER_NAME = "the answer's header names who speaks, which the template does only once it is said"
    AS_ENCODED = (
        "KV on shared edges stands as encoded: every answer keeps the header it was asked for with, such as an empty "
        "block of thoughts"
    )
    MERGED = (
        "users and model must take turns in the template, which is given what others say as one user's turn; on shared "
        "edges KV stands as encoded: other agents' turns are the model's"
    )
    LATER_DROPPED = "the template drops later instructions: they are a developer's or user's turn here"
    LATER_HOISTED = "the template puts later instructions in the place of the first: they keep their own turn here"
    LATER_JOINED = "the template puts later instructions behind the first, as one: they keep their own turn here"
    LATER_BARE = "nothing opens later instructions in the template: they are a user's turn here"
    LATER_RAISES = "the template raises at later instructions: they are a user's words here, and given to it as such"
    NO_SYSTEM = "the template has no instructions: they are the first words of the first user's turn"
    LAST_USER = "the template has instructions only in a user's turn that comes last: they stay in the first here"
    THOUGHTS = "thoughts are left out of what others see, and of what is read in later turns"
    OPENS_THOUGHTS = "the answer's header opens the thoughts, which the template leaves to the model"
    NO_OPENING = "the template opens an answer only behind a question: here an answer opens as it would there"
    BLANK = "a blank at the end of the answer's header is left to the first word"
    NO_BLANK = "the template's prompt ends without the blank that it has before an answer: it is written here"
    LAST_OPENING = "the template opens the last turn otherwise than the same turn with others behind it"
    LAST_END = "the template closes the last turn otherwise than the same turn with others behind it"
    GOES_ON = (
        "the template takes an answer that nothing follows for the beginning of the next, behind the same header: here "
        "it is over, and the next has its own"
    )
    JOINTS = "every message is tokens of its own: none is joined across two of them"
    UNKNOWN = "not explained"


@dataclass(frozen=True)
class AnswerPlaces:
    """What a template puts around an answer by where it stands, if that is not everywhere the same."""

    last_opening: str
    """Before one that nothing follows; `last_end`: behind it."""
    last_end: str
    behind_another: str | None
    """Before one that follows another, if anything; None if the template does not let it."""
    goes_on: bool
    """Whether one that nothing follows is left open when the model is to speak next."""


@dataclass(frozen=True)
class Undone:
    """In which respects a view is written as the template has it."""

    names: Literal["dropped", "header"] | None = None
    later: Literal["dropped", "hoisted", "joined", "bare"] | None = None
    thoughts: Literal["all", "last"] | None = None
    """Whose are written."""
    as_encoded: bool = False
    merged: bool = False
    last_user: Literal["moved", "dropped"] | None = None
    opens_thoughts: bool = False
    header: Literal["none", "blank", "no blank"] | None = None
    last_opening: bool = False
    last_end: bool = False
    goes_on: bool = False


ALTERNATIVES: Sequence[tuple[str, object, Reason]] = (
    ("merged", True, Reason.MERGED),
    ("names", "dropped", Reason.NAMES),
    ("names", "header", Reason.HEADER_NAME),
    ("as_encoded", True, Reason.AS_ENCODED),
    ("later", "dropped", Reason.LATER_DROPPED),
    ("later", "hoisted", Reason.LATER_HOISTED),
    ("later", "joined", Reason.LATER_JOINED),
    ("later", "bare", Reason.LATER_BARE),
    ("last_user", "moved", Reason.LAST_USER),
    ("last_user", "dropped", Reason.LAST_USER),
    ("thoughts", "all", Reason.THOUGHTS),
    ("thoughts", "last", Reason.THOUGHTS),
    ("opens_thoughts", True, Reason.OPENS_THOUGHTS),
    ("header", "none", Reason.NO_OPENING),
    ("header", "blank", Reason.BLANK),
    ("header", "no blank", Reason.NO_BLANK),
    ("last_opening", True, Reason.LAST_OPENING),
    ("last_end", True, Reason.LAST_END),
    ("goes_on", True, Reason.GOES_ON),
)
"""What can be undone, and why it is not as the template has it."""


class Rendering:
    """One view of one model.

    Args:
        chat: How the model writes turns.
        view: What is read.
        places: What the template puts around answers; None if it does not say.
        undone: What is written as the template has it.
    """

    def __init__(self, chat: ChatFormat, view: View, places: AnswerPlaces | None, undone: Undone | None = None) -> None:
        self.chat = chat
        self.view = view
        self.places = places
        self.undone = undone or Undone()
        self.merges = chat.merges is not None and (view.encodes_again or self.undone.merged)
        self.thinks = chat.thoughts is not None and chat.thoughts.usual

    @property
    def text(self) -> PromptText:
        """All of it."""
        return reduce(add, (each.text for each in self.messages()), PromptText())

    def messages(self) -> list[ReadMessage]:
        """It, message by message."""
        chat, undone, (public, own) = self.chat, self.undone, self._instructions()
        started = (PromptText.special(chat.bos), PromptText.special(chat.default_system))
        leading: list[_Part] = []
        if public is not None and not chat.leads:
            started = (chat.root(public), PromptText())
        elif public is not None:
            started = (PromptText.special(chat.bos), PromptText())
            leading = [("start", chat.system.around(public), "")]
            if undone.last_user is None:
                # Encoded as one: all agents' views begin with it.
                begun = PromptText.special(chat.bos + chat.user.plain) + leading.pop()[1]
                started = (begun, PromptText())
        read = _read("start", *started)
        told: list[_Part] = []
        if own is not None and chat.merges is not None and (chat.leads or chat.later is None):
            told = [(f"{self.view.reader} is told", chat.part(own), chat.merges)]
        elif own is not None:
            read += _read(f"{self.view.reader} is told", chat.turn("system", own, later=undone.later != "bare"))
        turns = self._turns()
        users = [number for number, turn in enumerate(turns) if not isinstance(turn, TalkTurn)]
        place = {None: users[0], "moved": users[-1], "dropped": -1}[undone.last_user]
        for number, turn in enumerate(turns):
            if isinstance(turn, TalkTurn):
                read += _read(turn.name, self._answer(turn, number, turns))
            else:
                first, at_first = leading if number == place else [], told if number == users[0] else []
                is_begun = public is not None and chat.leads and undone.last_user is None and number == users[0]
                read += self._user_turn([*first, *at_first, *turn], "" if is_begun else chat.user.plain)
        return [*read, *_read("answer's header", self._header())] if self.view.open else read

    def _instructions(self) -> tuple[str | None, str | None]:
        if not self.view.instructions:
            return None, None
        public, own = self.view.instructions
        joined = f"{public}{SEPARATOR}{own}"
        undone = {"dropped": (public, None), "hoisted": (own, None), "joined": (joined, None)}
        return undone.get(self.undone.later or "", (public, own))

    def _turns(self) -> list[list[_Part] | TalkTurn]:
        """The parts of each user's turn, and answers."""
        between = self.chat.merges or ""
        turns: list[list[_Part] | TalkTurn] = [[("question", self.chat.part(QUESTION), between)]]
        for said in self.view.turns:
            behind = turns[-1]
            if not self.merges or said.name == self.view.reader:
                turns.append(said)
            else:
                part = (said.name, self.chat.part(said.words, said.name), between)
                turns[-1:] = [behind, [part]] if isinstance(behind, TalkTurn) else [[*behind, part]]
        return turns

    def _user_turn(self, parts: Sequence[_Part], before: str) -> list[ReadMessage]:
        user = self.chat.user
        if self.chat.merges is None:
            [(label, part, _)] = parts
            return _read(label, PromptText.special(before) + part + PromptText.special(user.after))
        read: list[ReadMessage] = []
        between = before
        for number, (label, part, joint) in enumerate(parts):
            after = user.after if number == len(parts) - 1 else ""
            read += _read(label, PromptText.special(between), part, PromptText.special(after))
            between = joint
        return read

    def _answer(self, said: TalkTurn, number: int, turns: Sequence[list[_Part] | TalkTurn]) -> PromptText:
        chat, undone, places = self.chat, self.undone, self.places
        is_last = number == len(turns) - 1
        name = None if undone.names == "dropped" else said.name
        behind = None if places is None else places.behind_another
        unopened = undone.header == "none" and isinstance(turns[number - 1], TalkTurn) and behind is not None
        opening = chat.assistant.opening(name)
        if is_last and self._goes_on:
            return chat.header(None, thinking=self.thinks) + _called(name) + PromptText.plain(said.words)
        if chat.thoughts is not None and self._thought(said, is_last):
            header = chat.thoughts.header
            header = f"{behind}{header.removeprefix(chat.assistant.plain)}" if unopened else header
            thoughts = PromptText.special(header) + PromptText.plain(said.thoughts)
            opening = thoughts + PromptText.special(chat.thoughts.close) + _called(name)
        elif is_last and undone.last_opening and places is not None:
            opening = PromptText.special(places.last_opening) + _called(name)
        elif unopened:
            opening = PromptText.special(str(behind)) + _called(name)
        elif not (undone.as_encoded or self.thinks):
            blank = opening.text[len(opening.rstrip(" ").text) :]
            opening = chat.header(name) + PromptText.special(blank)
        end = places.last_end if is_last and undone.last_end and places is not None else chat.turn_end
        return opening + PromptText.plain(said.words) + PromptText.special(end)

    @property
    def _goes_on(self) -> bool:
        """Whether the last answer is the beginning of the next."""
        can = self.view.open and self.places is not None and self.places.goes_on
        return can and self.undone.goes_on and bool(self.view.turns)

    def _thought(self, said: TalkTurn, is_last: bool) -> bool:
        """Whether an answer has its thoughts before it: the reader's own has, if its template shows it earlier ones."""
        thoughts, undone = self.chat.thoughts, self.undone.thoughts
        recalled = thoughts is not None and thoughts.kept and self.thinks and said.name == self.view.reader
        return recalled or undone == "all" or (undone == "last" and is_last)

    def _header(self) -> PromptText:
        chat, undone = self.chat, self.undone
        if self._goes_on or (undone.header == "none" and self.view.turns):
            return PromptText()
        plain = PromptText.special(chat.assistant.plain if chat.answer is None else chat.answer)
        if undone.opens_thoughts and self.thinks:
            header = plain.rstrip(" ")
        else:
            name = self.view.reader if undone.names is None else None
            header = chat.header(name, thinking=self.thinks)
        if undone.header == "no blank":
            return header.rstrip(" \n")
        return header + PromptText.special(
            plain.text[len(plain.rstrip(" ").text) :] if undone.header == "blank" else ""
        )


def _read(label: str, *pieces: PromptText) -> list[ReadMessage]:
    """A message, if there is anything in it."""
    said = tuple(piece for piece in pieces if piece)
    return [ReadMessage(label, said)] if said else []


def _called(name: str | None) -> PromptText:
    return PromptText() if name is None else PromptText.plain(f"{name}: ")
