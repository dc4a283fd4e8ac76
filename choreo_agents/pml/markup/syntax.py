"""Syntax trees of schemas and prompts, with source positions, independent of a model.

    SchemaTree                    PromptTree
    ├── Text                      ├── Text
    ├── Parameter                 ├── Import (Argument)
    ├── Module (the same inside)  │   └── the same inside
    ├── Union of Modules          └── Turn of Text
    └── Turn (the same inside, but no Turn)

Trees are equal if their content is; source positions do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
TAGS = ("module", "union", "parameter", "param", *ROLES)
"""Elements inside a schema."""
Path = tuple[str, ...]
"""Names of a module and the modules around it, outermost first; () is the schema."""


@dataclass(frozen=True, order=True)
class SourcePlace:
    """Position in a source file; lines and columns count from 1, columns in characters."""

    file: str
    line: int
    column: int


@dataclass(frozen=True)
class Text:
    """Text, with the whitespace that belongs to it (see `whitespace`)."""

    text: str
    place: SourcePlace = field(compare=False)


@dataclass(frozen=True)
class Parameter:
    """A slot of `length` tokens for an argument."""

    name: str
    length: int
    lead: str
    """Blank before it, or nothing: the argument's first word is encoded with it."""
    place: SourcePlace = field(compare=False)
    scaffold: str = ""
    """Text in its place while its module is encoded."""


class _Scope:
    """Scope of names: a schema or module. Turns and unions have no scope of their own."""

    children: tuple[SchemaNode, ...]

    def modules(self) -> list[Module]:
        """Return the modules directly in this scope, not those in inner modules; likewise parameters and unions."""
        return [node for node in _in_scope(self.children) if isinstance(node, Module)]

    def parameters(self) -> list[Parameter]:
        return [node for node in _in_scope(self.children) if isinstance(node, Parameter)]

    def unions(self) -> list[Union]:
        return [node for node in _in_scope(self.children) if isinstance(node, Union)]


@dataclass(frozen=True)
class Module(_Scope):
    """A text that a prompt imports by name."""

    name: str
    children: tuple[SchemaNode, ...]
    place: SourcePlace = field(compare=False)
    cache: bool = True
    """False: it, and everything in it, is encoded with every prompt."""
    confidential: bool = False


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports at most one; they start at the same position."""

    members: tuple[Module, ...]
    place: SourcePlace = field(compare=False)
    scaffold: str = ""
    """Name of the member that text after the union attends to; empty: none."""


@dataclass(frozen=True)
class ChatTurn:
    """A chat turn; the model's chat template gives the text around it."""

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
    """Sets of modules that are encoded together, by names like `outer/inner`."""
    scaffold_place: SourcePlace | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Argument:
    name: str
    value: str
    place: SourcePlace = field(compare=False)


@dataclass(frozen=True)
class Import:
    """A module that a prompt imports, with arguments and imports inside it."""

    name: str
    arguments: tuple[Argument, ...]
    children: tuple[PromptNode, ...]
    place: SourcePlace = field(compare=False)


PromptNode = Text | Import | ChatTurn


@dataclass(frozen=True)
class PromptTree:
    schema: str
    arguments: tuple[Argument, ...]
    """Arguments of the schema's own parameters."""
    children: tuple[PromptNode, ...]
    place: SourcePlace = field(compare=False)


def modules_of(parent: SchemaTree | Module, path: Path = ()) -> Iterator[tuple[Path, Module]]:
    """Yield every module below, with its path, parents first, in the order of the text."""
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
