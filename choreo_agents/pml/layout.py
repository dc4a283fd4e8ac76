"""Positions of a schema's texts, slots, modules and unions (Prompt Cache, section 3.3).

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
from dataclasses import dataclass

from choreo_agents.models import FramedText
from choreo_agents.pml.flow import ArgumentSlot, Choice, Section, Words
from choreo_agents.pml.markup.syntax import Path, SourcePlace

Encode = Callable[[FramedText], list[int]]


@dataclass(frozen=True)
class TextSpan:
    """Tokens that stand together."""

    start: int
    text: str
    tokens: tuple[int, ...]
    ends: bool = False
    """Whether it closes a user's turn (see `Words`)."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SlotSpan:
    """The positions that a parameter holds."""

    start: int
    length: int
    name: str
    lead: str
    place: SourcePlace
    tokens: tuple[int, ...]
    """Of the text that holds its place; none: nothing in particular does."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class ModuleSpan:
    """The positions of a module, or of the whole schema, whose path is empty."""

    path: Path
    start: int
    length: int
    children: tuple[Span, ...]
    place: SourcePlace
    cached: bool
    confidential: bool
    """Both count for all that is inside."""
    open_ends: tuple[int, ...] = ()
    """Where users' turns end that nothing closes."""

    @property
    def end(self) -> int:
        return self.start + self.length

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
class UnionSpan:
    """The positions that members of a union share."""

    start: int
    length: int
    members: tuple[ModuleSpan, ...]
    scaffold: str
    """The member that stands there for what comes after it; empty: none."""

    @property
    def end(self) -> int:
        return self.start + self.length


Span = TextSpan | SlotSpan | ModuleSpan | UnionSpan


def lay_out(section: Section, encode: Encode, start: int = 0) -> ModuleSpan:
    """Give everything in a section its positions, the first of which is `start`."""
    children: list[Span] = []
    open_ends: list[int] = []
    at = start
    for item in section.items:
        span = _span(item, encode, at)
        if span.length or isinstance(span, ModuleSpan | UnionSpan):
            children.append(span)
        elif isinstance(span, TextSpan) and span.ends:
            open_ends.append(at)
        at = span.end
    return ModuleSpan(
        section.path,
        start,
        at - start,
        tuple(children),
        section.place,
        section.cached,
        section.confidential,
        tuple(open_ends),
    )


def _span(item: Words | ArgumentSlot | Section | Choice, encode: Encode, at: int) -> Span:
    match item:
        case Words():
            return TextSpan(at, item.text.text, tuple(encode(item.text)), item.ends)
        case ArgumentSlot():
            tokens = encode(FramedText.words(item.lead + item.scaffold)) if item.scaffold else ()
            return SlotSpan(at, item.length, item.name, item.lead, item.place, tuple(tokens))
        case Choice():
            members = tuple(lay_out(member, encode, at) for member in item.members)
            return UnionSpan(at, max((member.length for member in members), default=0), members, item.scaffold)
        case Section():
            return lay_out(item, encode, at)
