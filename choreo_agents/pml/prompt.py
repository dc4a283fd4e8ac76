"""A prompt, checked against its schema without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from choreo_agents.pml.markup.problems import Problems, nearest
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
    """What a prompt imports from its schema, and what it adds."""

    schema: SchemaTree
    tree: PromptTree
    arguments: Mapping[Path, Mapping[str, Argument]]
    """By the path of every module that is used, the schema's own among them, the values of its parameters."""

    @property
    def imports(self) -> tuple[Path, ...]:
        """The paths of the modules that it imports, in the order in which they are written."""
        return tuple(path for path in self.arguments if path)


def resolve(schema: SchemaTree, tree: PromptTree, problems: Problems) -> Prompt:
    """Find what a prompt names in its schema; what is not there, or not allowed, becomes a problem."""
    if tree.schema != schema.name:
        problems.add(tree.place, f"the prompt is of schema {tree.schema!r}", f"schema={schema.name!r}")
    resolver = _Resolver(schema, problems)
    resolver.enter(schema, tree, ())
    return Prompt(schema, tree, MappingProxyType(resolver.used))


class _Resolver:
    def __init__(self, schema: SchemaTree, problems: Problems) -> None:
        self.schema, self.problems = schema, problems
        self.used: dict[Path, Mapping[str, Argument]] = {}

    def enter(self, parent: SchemaTree | Module, tree: PromptTree | Import, path: Path) -> None:
        """Take what is imported inside a module, or the schema."""
        what = f"module {'/'.join(path)!r}" if path else f"schema {self.schema.name!r}"
        slots = {each.name for each in parent.parameters()}
        for argument in tree.arguments:
            if argument.name not in slots:
                message = f"{what} has no parameter {argument.name!r}"
                self.problems.add(argument.place, message, nearest(argument.name, slots, "no attribute"))
        self.used[path] = MappingProxyType({each.name: each for each in tree.arguments})
        modules = {module.name: module for module in parent.modules()}
        taken: dict[int, str] = {}
        for child in (child for child in tree.children if isinstance(child, Import)):
            module = modules.get(child.name)
            if module is None:
                self._unknown(child, path, what, modules)
                continue
            below = (*path, child.name)
            if below in self.used:
                self.problems.add(child.place, f"module {'/'.join(below)!r} is imported twice", "one import of it")
                continue
            for number, union in enumerate(parent.unions()):
                if any(member is module for member in union.members):
                    other = taken.setdefault(number, child.name)
                    if other != child.name:
                        message = f"{other!r} and {child.name!r} are members of one union"
                        self.problems.add(child.place, message, "one of them")
            self.enter(module, child, below)

    def _unknown(self, child: Import, path: Path, what: str, modules: Mapping[str, Module]) -> None:
        elsewhere = [found for found, _ in modules_of(self.schema) if found[-1] == child.name]
        if elsewhere:
            parents = elsewhere[0][:-1]
            inside = f"inside {'/'.join(parents)!r}" if parents else "in no other module"
            opened = "".join(f"<{name}>" for name in parents)
            closed = "".join(f"</{name}>" for name in reversed(parents))
            message = f"module {child.name!r} stands {inside}, not in {what}"
            self.problems.add(child.place, message, f"{opened}<{child.name}/>{closed}")
        else:
            expected = nearest(child.name, modules, "a module of the schema")
            self.problems.add(child.place, f"{what} has no module {child.name!r}", expected)
