"""`Schema`, which is read from PML, and `Prompt`, checked against its schema without a model."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from choreo_agents.errors import InvalidRequestError
from choreo_agents.pml.markup.parser import parse_prompt, parse_schema
from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.reading import read_document
from choreo_agents.pml.markup.syntax import (
    Argument,
    Import,
    Module,
    Path,
    PromptTree,
    SchemaTree,
    modules_of,
)


@dataclass(frozen=True)
class Prompt:
    """A prompt that is checked against its schema: imports, arguments, and text of its own."""

    schema: SchemaTree
    tree: PromptTree
    arguments: Mapping[Path, Mapping[str, Argument]]
    """Arguments by parameter name, by the path of every module that is used; () is the schema."""

    @property
    def imports(self) -> tuple[Path, ...]:
        """Paths of the imported modules, in the order of the text."""
        return tuple(path for path in self.arguments if path)


class _Resolver:
    def __init__(self, schema: SchemaTree, problems: Problems) -> None:
        self.schema, self.problems = schema, problems
        self.used: dict[Path, Mapping[str, Argument]] = {}

    def enter(self, parent: SchemaTree | Module, tree: PromptTree | Import, path: Path) -> None:
        """Resolve the arguments and imports inside a module, or the schema."""
        label = f"module {'/'.join(path)!r}" if path else f"schema {self.schema.name!r}"
        slots = {parameter.name for parameter in parent.parameters()}
        for argument in tree.arguments:
            if argument.name not in slots:
                message = f"{label} has no parameter {argument.name!r}"
                self.problems.add(argument.place, message, nearest(argument.name, slots, "no attribute"))
        self.used[path] = MappingProxyType({argument.name: argument for argument in tree.arguments})
        modules = {module.name: module for module in parent.modules()}
        taken: dict[int, str] = {}
        for child in (child for child in tree.children if isinstance(child, Import)):
            module = modules.get(child.name)
            if module is None:
                self._unknown(child, path, label, modules)
                continue
            below = (*path, child.name)
            if below in self.used:
                self.problems.add(child.place, f"module {'/'.join(below)!r} is imported twice", "one import of it")
                continue
            for number, union in enumerate(parent.unions()):
                if any(member is module for member in union.members):
                    taken_name = taken.setdefault(number, child.name)
                    if taken_name != child.name:
                        message = f"{taken_name!r} and {child.name!r} are members of one union"
                        self.problems.add(child.place, message, "one of them")
            self.enter(module, child, below)

    def _unknown(self, child: Import, path: Path, label: str, modules: Mapping[str, Module]) -> None:
        elsewhere = [module_path for module_path, _ in modules_of(self.schema) if module_path[-1] == child.name]
        if elsewhere:
            parents = elsewhere[0][:-1]
            inside = f"inside {'/'.join(parents)!r}" if parents else "in no other module"
            opened = "".join(f"<{name}>" for name in parents)
            closed = "".join(f"</{name}>" for name in reversed(parents))
            message = f"module {child.name!r} is {inside}, not in {label}"
            self.problems.add(child.place, message, f"{opened}<{child.name}/>{closed}")
        else:
            expected = nearest(child.name, modules, "a module of the schema")
            self.problems.add(child.place, f"{label} has no module {child.name!r}", expected)


@dataclass(frozen=True)
class Schema:
    """Modules of text that are encoded once, and that prompts import (Prompt Cache, section 3.2).

    Schemas with the same content are equal.
    """

    tree: SchemaTree

    def __post_init__(self) -> None:
        if not isinstance(self.tree, SchemaTree):
            raise InvalidRequestError(
                f"{self.tree!r:.60} is not a schema tree: use Schema.from_text(...) or Schema.from_file(...)"
            )

    def __repr__(self) -> str:
        return f"Schema({self.tree.name})"

    @classmethod
    def from_file(cls, path: str | pathlib.Path) -> Schema:
        """Read a schema from a file; files that it includes with `src` must lie below its folder.

        Raises:
            PMLError: The schema is invalid; lists all problems. OSError: There is no such file.
        """
        path = pathlib.Path(path)
        return cls.from_text(read_document(path), source=str(path), folder=path.parent)

    @classmethod
    def from_text(cls, text: str, *, source: str = "<schema>", folder: str | pathlib.Path | None = None) -> Schema:
        """Read a schema from text.

        Args:
            text: The `<schema>` element.
            source: Name of the text in errors.
            folder: Directory of the files of `src`; None: `src` is not allowed.

        Raises:
            PMLError: The schema is invalid; lists all problems.
        """
        return cls(parse_schema(text, source, None if folder is None else pathlib.Path(folder)))

    @property
    def name(self) -> str:
        return self.tree.name

    def prompt(self, pml: str, *, source: str = "<prompt>") -> Prompt:
        """Read a prompt and check it against this schema.

        Args:
            pml: A `<prompt>` element, or the content of one.
            source: Name of the text in errors.

        Raises:
            PMLError: The prompt is invalid; lists all problems.
        """
        problems = Problems()
        resolver = _Resolver(self.tree, problems)
        tree = parse_prompt(pml, source, problems, schema=self.name)
        if tree.schema != self.name:
            problems.add(tree.place, f"the prompt names schema {tree.schema!r}", f"schema={self.name!r}")
        resolver.enter(self.tree, tree, ())
        problems.require_none()
        return Prompt(self.tree, tree, MappingProxyType(resolver.used))

    def prompt_file(self, path: str | pathlib.Path) -> Prompt:
        """Read a prompt from a file; raises as `prompt` does, and `OSError`."""
        return self.prompt(read_document(pathlib.Path(path)), source=str(path))
