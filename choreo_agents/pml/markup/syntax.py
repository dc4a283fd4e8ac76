"""The syntax trees of schemas and prompts: what is written, where it stands, nothing about a model.

    SchemaTree                    PromptTree
    ├── Text                      ├── Text
    ├── Parameter                 ├── Import (Argument)
    ├── Module (the same inside)  │   └── the same inside
    ├── Union of Modules          └── Turn of Text
    └── Turn (the same inside, but no Turn)

Trees are equal if they say the same, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
TAGS = ("module", "union", "parameter", "param", *ROLES)
"""The elements inside a schema."""
Path = tuple[str, ...]
"""The names of a module and those that it is in, outermost first; () is the schema."""


@dataclass(frozen=True, order=True)
class SourcePlace:
    """Where something is written; lines and columns count from 1, columns in characters."""

    file: str
    line: int
    column: int


@dataclass(frozen=True)
class Text:
    """Words, with the whitespace that belongs to them (see `whitespace`)."""

    text: str
    place: SourcePlace = field(compare=False)


@dataclass(frozen=True)
class Parameter:
    """A slot of `length` tokens for an argument."""

    name: str
    length: int
    lead: str
    """The blank before it, or nothing: it belongs to the argument, whose first word is encoded with it."""
    place: SourcePlace = field(compare=False)
    scaffold: str = ""
    """The text that holds its place while its module is encoded."""


class _Scope:
    """A schema or module, in which things have names: turns and unions are no scopes of their own."""

    children: tuple[SchemaNode, ...]

    def modules(self) -> list[Module]:
        """All that stand in it, but in no module inside it; and so of the others."""
        return [node for node in _in_scope(self.children) if isinstance(node, Module)]

    def parameters(self) -> list[Parameter]:
        return [node for node in _in_scope(self.children) if isinstance(node, Parameter)]

    def unions(self) -> list[Union]:
        return [node for node in _in_scope(self.children) if isinstance(node, Union)]


@dataclass(frozen=True)
class Module(_Scope):
    """What a prompt imports by its name."""

    name: str
    children: tuple[SchemaNode, ...]
    place: SourcePlace = field(compare=False)
    cache: bool = True
    """False: it, and all in it, is encoded anew with every prompt."""
    confidential: bool = False


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports one at most; they start at the same position."""

    members: tuple[Module, ...]
    place: SourcePlace = field(compare=False)
    scaffold: str = ""
    """The name of the member that stands there while what comes after it is encoded; empty: none."""


@dataclass(frozen=True)
class ChatTurn:
    """A chat turn: the model's own template says what stands around it."""

    role: Role
    children: tuple[SchemaNode, ...]
    place: SourcePlace = field(compare=False)


SchemaNode = Text | Parameter | Module | Union | ChatTurn


@dataclass(frozen=True)
class SchemaTree(_Scope):
    name: str
    children: tuple[SchemaNode, ...]
    place: SourcePlace = field(compare=False)
    scaffolds: tuple[tuple[str, ...], ...] = ()
    """Sets of modules that are encoded together, each as its names with `/` between."""
    scaffold_place: SourcePlace | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Argument:
    name: str
    value: str
    place: SourcePlace = field(compare=False)


@dataclass(frozen=True)
class Import:
    """A module that a prompt uses, with the values of its parameters and what is imported inside it."""

    name: str
    arguments: tuple[Argument, ...]
    children: tuple[PromptNode, ...]
    place: SourcePlace = field(compare=False)


PromptNode = Text | Import | ChatTurn


@dataclass(frozen=True)
class PromptTree:
    schema: str
    arguments: tuple[Argument, ...]
    """For parameters that stand in no module."""
    children: tuple[PromptNode, ...]
    place: SourcePlace = field(compare=False)


def modules_of(parent: SchemaTree | Module, path: Path = ()) -> Iterator[tuple[Path, Module]]:
    """Every module below, with its path: parents first, in the order in which they are written."""
    for module in parent.modules():
        below = (*path, module.name)
        yield below, module
        yield from modules_of(module, below)


def _in_scope(children: tuple[SchemaNode, ...]) -> Iterator[SchemaNode]:
    for child in children:
        yield child
        if isinstance(child, Union):
            yield from child.members
        elif isinstance(child, ChatTurn):
            yield from _in_scope(child.children)
