"""What makes a tree a schema: names, unions, turns and scaffolds. Read and built schemas go through the same checks."""

from __future__ import annotations

import re
from itertools import combinations

from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.syntax import TAGS, ChatTurn, Module, Parameter, SchemaNode, SchemaTree, Union, modules_of

_NAME = re.compile(r"(?!(?i:xml))[^\W\d][\w.-]*")


def check_schema(tree: SchemaTree, problems: Problems, *, whole: bool = True) -> None:
    """Add what is wrong with a tree to the problems; one that breaks off is not asked for what it lacks."""
    _check_name(tree, "schema", problems)
    _check_names(tree, problems, f"schema {tree.name!r}")
    for parameter in tree.parameters():
        if parameter.name == "schema":
            problems.add(parameter.place, "a parameter of a schema is named 'schema'", "another name")
    _check_turns(tree.children, problems, None)
    for path, module in modules_of(tree):
        _check_names(module, problems, f"module {'/'.join(path)!r}")
    if whole:
        _check_scaffolds(tree, problems)


def _check_name(node: SchemaTree | Module | Parameter, kind: str, problems: Problems) -> None:
    """Have one that XML would not take, or that means something to it, told; who reads or builds tells empty ones."""
    if node.name and _NAME.fullmatch(node.name) is None:
        expected = "letters, digits, '_', '-' and '.', first a letter or '_', and not 'xml' first"
        problems.add(node.place, f"{node.name!r} cannot name a {kind}", expected)
    elif kind == "module" and node.name in ("schema", "prompt", *TAGS):
        message = f"a module is named {node.name!r}, which is an element of the language"
        problems.add(node.place, message, "another name")


def _check_names(parent: SchemaTree | Module, problems: Problems, what: str) -> None:
    for kind, nodes in (("module", parent.modules()), ("parameter", parent.parameters())):
        seen: dict[str, Module | Parameter] = {}
        for node in nodes:
            _check_name(node, kind, problems)
            if node.name and (first := seen.setdefault(node.name, node)) is not node:
                message = f"{what} has another {kind} {node.name!r} at line {first.place.line}"
                problems.add(node.place, message, "a name that is used once")
    for union in parent.unions():
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
        for path, other in combinations(sorted(dict.fromkeys(paths), key=len) if known else (), 2):
            both = f"{'/'.join(path)!r} and {'/'.join(other)!r}"
            at = next((at for at, (one, two) in enumerate(zip(path, other, strict=False)) if one != two), None)
            if at is None:
                message = f"in a scaffold, {both} are one inside the other"
                problems.add(place, message, "modules that do not contain each other")
            elif any(
                {path[at], other[at]} <= {each.name for each in union.members}
                for union in (modules[path[:at]] if at else tree).unions()
            ):
                message = f"in a scaffold, {both} are of members of one union"
                problems.add(place, message, "modules that a prompt can import together")
