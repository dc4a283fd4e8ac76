"""Builds schemas in Python: functions whose f-strings hold parameters become modules.

    @module
    def trip(days: Slot = slot(5)) -> str:
        return f"Plan a trip of {days} days."

    Schema.from_python("travel", [system("You plan travels."), user(trip, union(miami, paris))])

Texts are taken to the letter. The tree is the one that `Schema.to_pml()` would be read into.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from choreo_agents.pml.markup.checks import check_schema
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.reading import MOST_NESTED, forbidden_character
from choreo_agents.pml.markup.syntax import (
    ChatTurn,
    Module,
    Parameter,
    Role,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Union,
)
from choreo_agents.pml.markup.whitespace import append_text, lead_of

_HERE = SourcePlace("<python>", 1, 1)
_MARK = re.compile("\0([^\0]*)\0")
"""Stands for a parameter in a text; XML could not hold it, so no text means it."""


@dataclass(frozen=True)
class Slot:
    """A parameter of a module's function: write it into an f-string."""

    length: int
    name: str = ""
    scaffold: str = ""

    def __format__(self, spec: str) -> str:
        if spec:
            raise ValueError(f"a parameter has no format, it holds the place of an argument: {{{self.name}:{spec}}}")
        return str(self)

    def __str__(self) -> str:
        return f"\0{self.name}\0"

    __repr__ = __str__


@dataclass(frozen=True)
class ModulePart:
    """A module of a schema that is built."""

    name: str
    parts: tuple[Part, ...]
    slots: Mapping[str, Slot]
    cache: bool
    confidential: bool
    place: SourcePlace


@dataclass(frozen=True)
class UnionPart:
    """A union of a schema that is built."""

    members: tuple[ModulePart, ...]
    scaffold: str = ""


@dataclass(frozen=True)
class TurnPart:
    """A chat turn of a schema that is built."""

    role: Role
    parts: tuple[Part, ...]


Part = str | ModulePart | UnionPart | TurnPart
Content = str | Iterable[Part]
Writer = Callable[..., Content]
"""Its parameters are slots, by their defaults; it returns one text, or several parts."""


def slot(length: int, scaffold: str = "") -> Slot:
    """A parameter for arguments of up to `length` tokens: the default of a parameter of a module's function.

    Args:
        length: Of its arguments, in tokens.
        scaffold: The text that holds its place while the module is encoded.
    """
    return Slot(length, scaffold=scaffold)


@overload
def module(function: Writer, /) -> ModulePart: ...


@overload
def module(
    *, name: str | None = None, cache: bool = True, confidential: bool = False
) -> Callable[[Writer], ModulePart]: ...


def module(
    function: Writer | None = None, /, *, name: str | None = None, cache: bool = True, confidential: bool = False
) -> Any:
    """Make a module of a function, under its name unless another is given."""

    def made(function: Writer) -> ModulePart:
        place = _place(function)
        slots, content = _called(function)
        said = getattr(function, "__name__", "") if name is None else name
        return ModulePart(said, content, slots, cache, confidential, place)

    return made if function is None else made(function)


def module_of(name: str, *parts: Part, cache: bool = True, confidential: bool = False) -> ModulePart:
    """A module without parameters."""
    return ModulePart(name, parts, {}, cache, confidential, _HERE)


def union(*members: ModulePart, scaffold: str = "") -> UnionPart:
    """Modules of which a prompt imports one at most.

    Args:
        members: The modules.
        scaffold: The name of the one that stands there while what comes after it is encoded; empty: none.
    """
    return UnionPart(members, scaffold)


def system(*parts: Part) -> TurnPart:
    """A system turn."""
    return TurnPart("system", parts)


def user(*parts: Part) -> TurnPart:
    """A user's turn."""
    return TurnPart("user", parts)


def assistant(*parts: Part) -> TurnPart:
    """An assistant's turn."""
    return TurnPart("assistant", parts)


def build(name: str, content: Content | Writer, scaffolds: Iterable[Iterable[str]] = ()) -> SchemaTree:
    """The tree of a schema; raises a `PMLError` with all that is wrong in it."""
    place = _place(content) if callable(content) else _HERE
    slots, parts = _called(content) if callable(content) else ({}, _parts(content))
    problems = Problems()
    nodes = _Builder(problems, slots, place).whole(parts, 1)
    sets = tuple(tuple(names) for names in scaffolds)
    tree = SchemaTree(name, nodes, place, sets, None)
    if not name:
        problems.add(place, "the schema has an empty name", "a name")
    check_schema(tree, problems)
    problems.require_none()
    return tree


def _place(function: Writer) -> SourcePlace:
    code = getattr(function, "__code__", None)
    return _HERE if code is None else SourcePlace(Path(code.co_filename).name, code.co_firstlineno, 1)


def _called(function: Writer) -> tuple[Mapping[str, Slot], tuple[Part, ...]]:
    """The parameters of a function, and what it returns for them."""
    slots: dict[str, Slot] = {}
    for each in inspect.signature(function).parameters.values():
        if not isinstance(each.default, Slot):
            raise TypeError(f"parameter {each.name!r} of {function!r} has no slot: write {each.name}: Slot = slot(5)")
        slots[each.name] = replace(each.default, name=each.name)
    return slots, _parts(function(**slots))


def _parts(content: Content) -> tuple[Part, ...]:
    return (content,) if isinstance(content, str) else tuple(content)


@dataclass(frozen=True)
class _Builder:
    """Makes the nodes of a module, or of the schema."""

    problems: Problems
    slots: Mapping[str, Slot]
    place: SourcePlace
    used: set[str] = field(default_factory=set)

    def whole(self, parts: Iterable[Part], depth: int) -> tuple[SchemaNode, ...]:
        """All nodes, in which each of the slots must be."""
        nodes = self.nodes(parts, depth)
        for name in (name for name in self.slots if name not in self.used):
            self.problems.add(self.place, f"parameter {name!r} stands in no text", f"{{{name}}} in an f-string")
        return nodes

    def nodes(self, parts: Iterable[Part], depth: int) -> tuple[SchemaNode, ...]:
        """Those of these parts."""
        nodes: list[SchemaNode] = []
        if depth >= MOST_NESTED:
            self.problems.add(self.place, f"more than {MOST_NESTED} elements are nested", f"at most {MOST_NESTED}")
            return ()
        for part in parts:
            if isinstance(part, str):
                self._text(nodes, part)
            elif isinstance(part, ModulePart):
                nodes.append(self._module(part, depth))
            elif isinstance(part, UnionPart):
                members = tuple(self._module(member, depth + 1) for member in part.members)
                nodes.append(Union(members, members[0].place if members else self.place, part.scaffold))
            elif isinstance(part, TurnPart):
                nodes.append(ChatTurn(part.role, self.nodes(part.parts, depth + 1), self.place))
            else:
                self.problems.add(self.place, f"{part!r} is no part of a schema", "text, a module, a union or a turn")
        return tuple(nodes)

    def _module(self, part: ModulePart, depth: int) -> Module:
        if not part.name:
            self.problems.add(part.place, "the module has an empty name", "a name")
        children = _Builder(self.problems, part.slots, part.place).whole(part.parts, depth + 1)
        return Module(part.name, children, part.place, part.cache, part.confidential)

    def _text(self, nodes: list[SchemaNode], text: str) -> None:
        for number, piece in enumerate(_MARK.split(text)):
            if number % 2 == 0:
                self._check_characters(piece)
                append_text(nodes, piece, self.place)
            elif piece not in self.slots:
                self.problems.add(self.place, f"the text has parameter {piece!r} of another module", "one of its own")
            else:
                self.used.add(piece)
                size, scaffold = self.slots[piece].length, self.slots[piece].scaffold
                self._check_characters(scaffold)
                if not 1 <= size <= 999_999_999:
                    self.problems.add(self.place, f"parameter {piece!r} has length {size}", "from 1 to 999999999")
                nodes.append(Parameter(piece, size, lead_of(nodes), self.place, scaffold))

    def _check_characters(self, text: str) -> None:
        bad = forbidden_character(text)
        if bad is not None:
            self.problems.add(self.place, f"the character {bad.group()!r} is not allowed in XML", "text without it")
