"""A schema as one model's chat template writes it: turns have become words, everything else stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_agents.models import ChatFormat, FramedText
from choreo_agents.pml.markup.syntax import (
    ChatTurn,
    Module,
    Parameter,
    Path,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Text,
    Union,
)


@dataclass(frozen=True)
class Words:
    """Text that is tokenized as a whole: the schema's are words, the template's frames."""

    text: FramedText
    ends: bool = False
    """Whether it is what closes a user's turn, if only nothing, where users and model must take turns: then nothing is
    joined to it."""


@dataclass(frozen=True)
class ArgumentSlot:
    """Room for an argument; `lead` is encoded before its first word."""

    name: str
    length: int
    lead: str
    place: SourcePlace
    scaffold: str
    """What holds its place; empty: nothing in particular."""


@dataclass(frozen=True)
class Section:
    """A module, or the whole schema, whose path is empty; `cached` and `confidential` count what it is in."""

    path: Path
    items: tuple[Item, ...]
    place: SourcePlace
    cached: bool
    confidential: bool


@dataclass(frozen=True)
class Choice:
    """A union."""

    members: tuple[Section, ...]
    scaffold: str
    """The member that stands there for what comes after it."""


Item = Words | ArgumentSlot | Section | Choice


def written_by(chat: ChatFormat, tree: SchemaTree) -> Section:
    """The schema as a model's template writes it, with what it writes at the start of every conversation.

    A blank that the template puts before a turn's words belongs to the first of them, wherever that stands: modules
    get it if they come first. Such is the way tokenizers read.
    """
    section = _Section(chat, (), tree.place, cached=True, confidential=False)
    section.write(FramedText.frame(chat.bos))
    section.add(tree.children)
    return section.done()


class _Section:
    """Collects the items of one section."""

    def __init__(
        self, chat: ChatFormat, path: Path, place: SourcePlace, *, cached: bool, confidential: bool, owed: str = ""
    ) -> None:
        self.chat, self.path, self.place = chat, path, place
        self.cached, self.confidential = cached, confidential
        self.items: list[Item] = []
        self.owed = owed
        """The blank that the next words start with, unless they bring whitespace of their own."""

    def done(self) -> Section:
        return Section(self.path, tuple(self.items), self.place, self.cached, self.confidential)

    def add(self, children: tuple[SchemaNode, ...]) -> None:
        for child in children:
            match child:
                case Text():
                    self.write(FramedText.words(child.text))
                case Parameter():
                    lead, self.owed = child.lead or self.owed, ""
                    self.items.append(ArgumentSlot(child.name, child.length, lead, child.place, child.scaffold))
                case Module():
                    self.items.append(self._inner(child))
                    self.owed = ""
                case Union():
                    members = tuple(self._inner(member) for member in child.members)
                    self.items.append(Choice(members, child.scaffold))
                    self.owed = ""
                case ChatTurn():
                    self._turn(child)

    def write(self, text: FramedText) -> None:
        """Append words to those that stand right before."""
        if not text:
            return
        text = text if text.text[0].isspace() else FramedText.frame(self.owed) + text
        self.owed = ""
        last = self.items[-1] if self.items else None
        if isinstance(last, Words) and not last.ends:
            self.items.pop()
            text = last.text + text
        self.items.append(Words(text))

    def _turn(self, turn: ChatTurn) -> None:
        # Where instructions stand in the first user's turn, a turn of them is a user's.
        system = self.chat.user if self.chat.leads else self.chat.system
        form = {"system": system, "user": self.chat.user, "assistant": self.chat.assistant}[turn.role]
        is_users = self.chat.merges is not None and form is self.chat.user
        opening = self._joint() if is_users else None
        opening = form.plain if opening is None else opening
        bare = opening.rstrip(" ")
        self.write(FramedText.frame(bare))
        self.owed = opening[len(bare) :]
        self.add(turn.children)
        self.owed = ""
        if not is_users:
            self.write(FramedText.frame(form.after))
        else:
            self.items.append(Words(FramedText.frame(form.after), ends=True))

    def _joint(self) -> str | None:
        """What is written in the place of a user's turn's opening right behind another, which is opened again."""
        last = self.items[-1] if self.items else None
        if not isinstance(last, Words) or not last.ends:
            return None
        self.items.pop()
        return self.chat.merges

    def _inner(self, module: Module) -> Section:
        inner = _Section(
            self.chat,
            (*self.path, module.name),
            module.place,
            cached=self.cached and module.cache,
            confidential=self.confidential or module.confidential,
            owed=self.owed,
        )
        inner.add(module.children)
        return inner.done()
