"""Positions of a schema's texts, slots, modules and unions, as a model's chat template writes them (Prompt Cache, 3.3).

Everything starts where what is written before it ends. Members of a union share a start, and the longest of them says
where the union ends. A parameter takes as many positions as its length says, whatever the argument. So a module has one
start, which no prompt changes: a module that is not imported, a shorter member, a shorter or missing argument leave
gaps.

     0         7      9            14        20
     ├─ text ──┼─slot─┼── union ───┼── text ─┤
                      ├─ long ─────┤
                      ├─ short ─┤ gap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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

Encode = Callable[[FramedText], list[int]]


@dataclass(frozen=True)
class _Placed:
    """Positions."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TextSpan(_Placed):
    """Tokens that stand together: the schema's words, and the template's frames."""

    text: str
    tokens: tuple[int, ...]
    ends: bool = False
    """Whether it closes a user's turn, where users and model must take turns: then nothing is joined to it."""


@dataclass(frozen=True)
class SlotSpan(_Placed):
    """The positions that a parameter holds."""

    name: str
    lead: str
    """Is encoded before an argument, as one text with it: a blank, or nothing."""
    place: SourcePlace
    tokens: tuple[int, ...]
    """Of the text that holds its place; none: nothing in particular does."""


@dataclass(frozen=True)
class ModuleSpan(_Placed):
    """The positions of a module, or of the whole schema, whose path is empty."""

    path: Path
    children: tuple[Span, ...]
    place: SourcePlace
    cached: bool
    confidential: bool
    """Both count for all that is inside."""
    open_ends: tuple[int, ...] = ()
    """Where users' turns end that nothing closes."""

    def modules(self) -> Iterator[ModuleSpan]:
        """This and every module inside, in the order in which they are written."""
        yield self
        for child in self.children:
            for module in child.members if isinstance(child, UnionSpan) else (child,):
                if isinstance(module, ModuleSpan):
                    yield from module.modules()

    def own(self) -> Iterator[TextSpan | SlotSpan]:
        """Its own texts and slots: not those of modules inside."""
        return (child for child in self.children if isinstance(child, TextSpan | SlotSpan))


@dataclass(frozen=True)
class UnionSpan(_Placed):
    """The positions that members of a union share."""

    members: tuple[ModuleSpan, ...]
    scaffold: str
    """The member that stands there for what comes after it; empty: none."""


Span = TextSpan | SlotSpan | ModuleSpan | UnionSpan


def lay_out(tree: SchemaTree, chat: ChatFormat, encode: Encode) -> ModuleSpan:
    """Give everything in a schema its positions, behind what a template writes at the start of every conversation.

    A blank that the template puts before a turn's words belongs to the first of them, wherever that stands: modules
    get it if they come first. Such is the way tokenizers read.
    """
    writing = _Writing(chat, encode, (), tree.place, 0, cached=True, confidential=False)
    writing.write(FramedText.frame(chat.bos))
    return writing.done(tree.children)


@dataclass
class _Writing:
    """Writes the schema, or a module of it, from a position on."""

    chat: ChatFormat
    encode: Encode
    path: Path
    place: SourcePlace
    start: int
    cached: bool
    confidential: bool
    owed: str = ""
    """The blank that the next words start with, unless they bring whitespace of their own."""
    spans: list[Span] = field(default_factory=list)
    open_ends: list[int] = field(default_factory=list)
    words: FramedText | None = None
    """What stands last, and may go on, ..."""
    closing: FramedText | None = None
    """... unless this closes the user's turn that it ends, if only nothing."""

    @property
    def at(self) -> int:
        """The position of what comes next, once what stands last has its own."""
        return self.spans[-1].end if self.spans else self.start

    def done(self, children: tuple[SchemaNode, ...]) -> ModuleSpan:
        self.add(children)
        self._settle()
        where, ends = (self.start, self.at - self.start, self.path, tuple(self.spans)), tuple(self.open_ends)
        return ModuleSpan(*where, self.place, self.cached, self.confidential, ends)

    def add(self, children: tuple[SchemaNode, ...]) -> None:
        for child in children:
            if isinstance(child, Text):
                self.write(FramedText.words(child.text))
            elif isinstance(child, ChatTurn):
                self._turn(child)
            else:
                self._settle()
                self.spans.append(self._span(child))
                self.owed = ""

    def _span(self, node: Parameter | Module | Union) -> Span:
        if isinstance(node, Parameter):
            lead = node.lead or self.owed
            held = self.encode(FramedText.words(lead + node.scaffold)) if node.scaffold else ()
            return SlotSpan(self.at, node.length, node.name, lead, node.place, tuple(held))
        if isinstance(node, Module):
            return self._inner(node)
        members = tuple(self._inner(member) for member in node.members)
        return UnionSpan(self.at, max((each.length for each in members), default=0), members, node.scaffold)

    def write(self, text: FramedText) -> None:
        """Append words to those that stand right before."""
        if text:
            text = text if text.text[0].isspace() else FramedText.frame(self.owed) + text
            self.owed = ""
            if self.closing is not None:
                self._settle()
            self.words = text if self.words is None else self.words + text

    def _turn(self, turn: ChatTurn) -> None:
        # Where instructions stand in the first user's turn, a turn of them is a user's.
        system = self.chat.user if self.chat.leads else self.chat.system
        form = {"system": system, "user": self.chat.user, "assistant": self.chat.assistant}[turn.role]
        is_users, opening = self.chat.merges is not None and form is self.chat.user, form.plain
        if is_users and self.closing is not None:
            # Right behind another turn of a user's, which is opened again.
            self.closing, opening = None, str(self.chat.merges)
        bare = opening.rstrip(" ")
        self.write(FramedText.frame(bare))
        self.owed = opening[len(bare) :]
        self.add(turn.children)
        self.owed, after = "", FramedText.frame(form.after)
        if is_users:
            if self.closing is not None:
                self._settle()
            self.closing = after
        else:
            self.write(after)

    def _settle(self) -> None:
        """Give what stands last its positions."""
        for text, ends in ((self.words, False), (self.closing, True)):
            if text is not None and (tokens := tuple(self.encode(text))):
                self.spans.append(TextSpan(self.at, len(tokens), text.text, tokens, ends))
            elif text is not None and ends:
                self.open_ends.append(self.at)
        self.words = self.closing = None

    def _inner(self, module: Module) -> ModuleSpan:
        cached, confidential = self.cached and module.cache, self.confidential or module.confidential
        where = ((*self.path, module.name), module.place, self.at)
        return _Writing(self.chat, self.encode, *where, cached, confidential, self.owed).done(module.children)
