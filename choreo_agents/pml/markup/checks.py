"""What makes a tree a schema: names, unions, turns and scaffolds. Read and built schemas go through the same checks."""

from __future__ import annotations

import re

from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.syntax import (
    ROLES,
    ChatTurn,
    Module,
    Path,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Union,
    modules_of,
    scope_of,
)

_NAME = re.compile(r"[^\W\d][\w.-]*")
_TAGS = frozenset({"schema", "prompt", "module", "union", "parameter", "param", *ROLES})
_XML = re.compile("xml", re.IGNORECASE)


def check_schema(tree: SchemaTree, problems: Problems, *, whole: bool = True) -> None:
    """Add what is wrong with a tree to the problems; one that breaks off is not asked for what it lacks."""
    if not _named(tree.name) and tree.name:
        _add_name(problems, tree.place, "schema", tree.name)
    _check_names(tree, problems, f"schema {tree.name!r}")
    for parameter in scope_of(tree).parameters:
        if parameter.name == "schema":
            problems.add(parameter.place, "a parameter of a schema is named 'schema'", "another name")
    _check_turns(tree.children, problems, None)
    for path, module in modules_of(tree):
        _check_names(module, problems, f"module {'/'.join(path)!r}")
    if whole:
        _check_scaffolds(tree, problems)


def _named(name: str) -> bool:
    """Whether XML has it as a name, with which no special meaning comes."""
    return _NAME.fullmatch(name) is not None and not _XML.match(name)


def _add_name(problems: Problems, place: SourcePlace, what: str, name: str) -> None:
    message = f"{name!r} cannot name a {what}" if name else f"the {what} has an empty name"
    problems.add(place, message, "letters, digits, '_', '-' and '.', first a letter or '_', and not 'xml' first")


def _check_names(parent: SchemaTree | Module, problems: Problems, what: str) -> None:
    scope = scope_of(parent)
    for kind, nodes in (("module", scope.modules), ("parameter", scope.parameters)):
        seen: dict[str, SourcePlace] = {}
        for node in nodes:
            if not node.name:
                continue
            if not _named(node.name):
                _add_name(problems, node.place, kind, node.name)
            elif kind == "module" and node.name in _TAGS:
                message = f"a module is named {node.name!r}, which is an element of the language"
                problems.add(node.place, message, "another name")
            if node.name in seen:
                message = f"{what} has another {kind} {node.name!r} at line {seen[node.name].line}"
                problems.add(node.place, message, "a name that is used once")
            seen.setdefault(node.name, node.place)
    for union in scope.unions:
        named = [member for member in union.members if member.name == union.scaffold]
        if not union.members:
            problems.add(union.place, "a <union> has no members", "<module> inside")
        elif union.scaffold and not named:
            message = f"the scaffold of a <union> names {union.scaffold!r}, which is none of its members"
            expected = nearest(union.scaffold, (member.name for member in union.members), "the name of a member")
            problems.add(union.place, message, expected)
        elif named and not named[0].cache:
            message = f"the scaffold of a <union> names {union.scaffold!r}, which is not cached"
            problems.add(union.place, message, "a member that is cached, or no scaffold")


def _check_turns(children: tuple[SchemaNode, ...], problems: Problems, inside: str | None) -> None:
    for child in children:
        if isinstance(child, ChatTurn):
            if inside is not None:
                message = f"there is a <{child.role}> in a <{inside}>"
                problems.add(child.place, message, "a turn in no other")
            _check_turns(child.children, problems, child.role)
        elif isinstance(child, Module):
            _check_turns(child.children, problems, inside)
        elif isinstance(child, Union):
            _check_turns(child.members, problems, inside)


def _check_scaffolds(tree: SchemaTree, problems: Problems) -> None:
    place = tree.scaffold_place or tree.place
    modules = dict(modules_of(tree))
    uncached = {path for path in modules if not all(modules[path[:n]].cache for n in range(1, len(path) + 1))}
    chosen = _choices(tree, ())
    seen: set[frozenset[str]] = set()
    for names in tree.scaffolds:
        paths = [tuple(name.split("/")) for name in names]
        known = True
        for name, path in zip(names, paths, strict=True):
            if path not in modules:
                known = False
                expected = nearest(name, ("/".join(each) for each in modules), "names of modules, as in 'a b; c a/d'")
                problems.add(place, f"a scaffold names {name!r}, which is no module of the schema", expected)
            elif path in uncached:
                problems.add(place, f"a scaffold names {name!r}, which is not cached", "modules that are cached")
        said = " ".join(names)
        if len(set(names)) != len(names) or len(names) < 2:
            problems.add(place, f"the scaffold {said!r} has too few modules, or one twice", "two or more modules")
        if frozenset(names) in seen:
            problems.add(place, f"the scaffold {said!r} is declared twice", "each set once")
        seen.add(frozenset(names))
        there, members = set(paths), dict[tuple[Path, int], Path]()
        for path in paths if known else ():
            for above in (path[:count] for count in range(1, len(path)) if path[:count] in there):
                message = f"in a scaffold, {'/'.join(above)!r} and {'/'.join(path)!r} are one inside the other"
                problems.add(place, message, "modules that do not contain each other")
            for union, member in chosen[path].items():
                other = members.setdefault(union, path)
                if chosen[other][union] != member:
                    message = f"in a scaffold, {'/'.join(path)!r} and {'/'.join(other)!r} are of members of one union"
                    problems.add(place, message, "modules that a prompt can import together")


def _choices(parent: SchemaTree | Module, path: Path) -> dict[Path, dict[tuple[Path, int], str]]:
    """By module, which member of which union it is or stands in."""
    found: dict[Path, dict[tuple[Path, int], str]] = {}
    scope = scope_of(parent)
    unions = {id(member): (path, number) for number, union in enumerate(scope.unions) for member in union.members}
    for module in scope.modules:
        below = (*path, module.name)
        own = {unions[id(module)]: module.name} if id(module) in unions else {}
        found[below] = own
        found |= {inner: own | choice for inner, choice in _choices(module, below).items()}
    return found
