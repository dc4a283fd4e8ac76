"""Builder of schemas in Python: functions whose f-strings contain parameters become modules.

    @module
    def trip(days: Slot = slot(5)) -> str:
        return f"Plan a trip of {days} days."

    Schema.from_python("travel", [system("You plan travels."), user(trip, union(miami, paris))])

Texts are taken verbatim. The tree is the same as if `Schema.to_pml()` were read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from choreo_agents.pml.markup.parser import check_schema
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.reading import MOST_NESTED, forbidden_character
from choreo_agents.pml.markup.syntax import (
    ChatTurn,
    Module,
    Parameter,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Text,
    Union,
)
from choreo_agents.pml.markup.whitespace import append_text, lead_of

_HERE = SourcePlace("<python>", 1, 1)
_MARK = re.compile("\0([^\0]*)\0")
"""Mark of a parameter in a text: a character that XML cannot contain, so that no text does."""


@dataclass(frozen=True)
class Slot:
    """A parameter of a module's function; put it into an f-string."""

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
class _FunctionModule(Module):
    """A module, or the schema, returned by a function; its texts still have marks for parameters."""

    slots: Mapping[str, Slot] = field(default_factory=dict)


Part = str | Module | Union | ChatTurn
Content = str | Iterable[Part]
Writer = Callable[..., Content]
"""Function whose parameters have slots as defaults, and that returns one text or several parts."""


def slot(length: int, scaffold: str = "") -> Slot:
    """Return a slot for arguments of up to `length` tokens: the default of a parameter of a module's function.

    Args:
        length: Longest argument, in tokens.
        scaffold: Text in its place while the module is encoded.
    """
    return Slot(length, scaffold=scaffold)


@overload
def module(function: Writer, /) -> Module: ...


@overload
def module(
    *, name: str | None = None, cache: bool = True, confidential: bool = False
) -> Callable[[Writer], Module]: ...


def module(
    function: Writer | None = None, /, *, name: str | None = None, cache: bool = True, confidential: bool = False
) -> Any:
    """Make a module of a function, with the function's name unless another is given."""

    def decorate(function: Writer) -> Module:
        module_name = getattr(function, "__name__", "") if name is None else name
        return _call(module_name, function, cache=cache, confidential=confidential)

    return decorate if function is None else decorate(function)


def module_of(name: str, *parts: Part, cache: bool = True, confidential: bool = False) -> Module:
    """Make a module without parameters."""
    return Module(name, _nodes(parts), _HERE, cache, confidential)


def union(*members: Module, scaffold: str = "") -> Union:
    """Make a union: modules of which a prompt imports at most one.

    Args:
        members: The modules.
        scaffold: Name of the member that is visible to text after the union while that is encoded; empty: none.
    """
    return Union(members, _HERE, scaffold)


def system(*parts: Part) -> ChatTurn:
    """Make a system turn."""
    return ChatTurn("system", _nodes(parts), _HERE)


def user(*parts: Part) -> ChatTurn:
    """Make a user's turn."""
    return ChatTurn("user", _nodes(parts), _HERE)


def assistant(*parts: Part) -> ChatTurn:
    """Make an assistant's turn."""
    return ChatTurn("assistant", _nodes(parts), _HERE)


def build(name: str, content: Content | Writer, scaffolds: Iterable[Iterable[str]] = ()) -> SchemaTree:
    """Build the tree of a schema; raise a `PMLError` with all problems in it."""
    problems = Problems()
    written = _call(name, content) if callable(content) else Module(name, _nodes(content), _HERE)
    whole = _Builder(problems, written).build("schema", 1)
    tree = SchemaTree(name, whole.children, whole.place, tuple(tuple(names) for names in scaffolds))
    check_schema(tree, problems)
    problems.require_none()
    return tree


def _call(name: str, function: Writer, *, cache: bool = True, confidential: bool = False) -> _FunctionModule:
    """Call a function with its slots, and make a module of the result."""
    slots: dict[str, Slot] = {}
    for param in inspect.signature(function).parameters.values():
        if not isinstance(param.default, Slot):
            raise TypeError(f"parameter {param.name!r} of {function!r} has no slot: write {param.name}: Slot = slot(5)")
        slots[param.name] = replace(param.default, name=param.name)
    code = getattr(function, "__code__", None)
    place = _HERE if code is None else SourcePlace(Path(code.co_filename).name, code.co_firstlineno, 1)
    return _FunctionModule(name, _nodes(function(**slots)), place, cache, confidential, slots)


def _nodes(content: Content) -> tuple[SchemaNode, ...]:
    parts = (content,) if isinstance(content, str) else content
    return tuple(Text(part, _HERE) if isinstance(part, str) else part for part in parts)


class _Builder:
    """Builder of the nodes of a module, or of the schema."""

    def __init__(self, problems: Problems, written: Module) -> None:
        self.problems, self.written, self.place = problems, written, written.place
        self.slots = written.slots if isinstance(written, _FunctionModule) else {}
        self.used: set[str] = set()

    def build(self, kind: str, depth: int) -> Module:
        """Build the module; report slots that are in no text."""
        if not self.written.name:
            self.problems.add(self.place, f"the {kind} has an empty name", "a name")
        nodes, written = self.build_nodes(self.written.children, depth), self.written
        for name in (name for name in self.slots if name not in self.used):
            self.problems.add(self.place, f"parameter {name!r} stands in no text", f"{{{name}}} in an f-string")
        return Module(written.name, nodes, self.place, written.cache, written.confidential)

    def build_nodes(self, parts: Iterable[SchemaNode], depth: int) -> tuple[SchemaNode, ...]:
        """Build the nodes of some parts."""
        nodes: list[SchemaNode] = []
        if depth >= MOST_NESTED:
            self.problems.add(self.place, f"more than {MOST_NESTED} elements are nested", f"at most {MOST_NESTED}")
            return ()
        for part in parts:
            match part:
                case Text():
                    self._text(nodes, part.text)
                case Module():
                    nodes.append(_Builder(self.problems, part).build("module", depth + 1))
                case Union():
                    inside = (_Builder(self.problems, member) for member in part.members)
                    members = tuple(member.build("module", depth + 2) for member in inside)
                    nodes.append(Union(members, members[0].place if members else self.place, part.scaffold))
                case ChatTurn():
                    nodes.append(ChatTurn(part.role, self.build_nodes(part.children, depth + 1), self.place))
                case _:
                    message = f"{part!r} is no part of a schema"
                    self.problems.add(self.place, message, "text, a module, a union or a turn")
        return tuple(nodes)

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
