"""Parser of PML, which reports all problems in one pass.

`check_schema` checks names, unions and scaffolds of a parsed schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from xml.sax.saxutils import quoteattr

from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.reading import RawElement, RawText, read_included, read_xml
from choreo_agents.pml.markup.syntax import (
    ROLES,
    TAGS,
    Argument,
    ChatTurn,
    Import,
    Module,
    Parameter,
    PromptNode,
    PromptTree,
    Role,
    SchemaNode,
    SchemaTree,
    Text,
    Union,
    modules_of,
)
from choreo_agents.pml.markup.whitespace import Flow, append_text

_NAME = re.compile(r"(?!(?i:xml))[^\W\d][\w.-]*")


def check_schema(tree: SchemaTree, problems: Problems, *, whole: bool = True) -> None:
    """Add the problems of a schema's tree; with `whole=False`, for a truncated document, skip scaffolds."""
    _check_name(tree, "schema", problems)
    _check_names(tree, problems, f"schema {tree.name!r}")
    for parameter in tree.parameters():
        if parameter.name == "schema":
            problems.add(parameter.place, "a parameter of a schema is named 'schema'", "another name")
    for path, module in modules_of(tree):
        _check_names(module, problems, f"module {'/'.join(path)!r}")
    if whole:
        _check_scaffolds(tree, problems)


def _check_name(node: SchemaTree | Module | Parameter, kind: str, problems: Problems) -> None:
    """Report a name that XML does not allow or that is reserved; callers report empty names."""
    if node.name and _NAME.fullmatch(node.name) is None:
        expected = "letters, digits, '_', '-' and '.', first a letter or '_', and not 'xml' first"
        problems.add(node.place, f"{node.name!r} is not a valid name of a {kind}", expected)
    elif kind == "module" and node.name in ("schema", "prompt", *TAGS):
        message = f"a module is named {node.name!r}, which is an element of PML"
        problems.add(node.place, message, "another name")


def _check_names(parent: SchemaTree | Module, problems: Problems, label: str) -> None:
    for kind, nodes in (("module", parent.modules()), ("parameter", parent.parameters())):
        by_name: dict[str, Module | Parameter] = {}
        for node in nodes:
            _check_name(node, kind, problems)
            if node.name and (first := by_name.setdefault(node.name, node)) is not node:
                message = f"{label} has another {kind} {node.name!r} at line {first.place.line}"
                problems.add(node.place, message, "a name that is used once")
    for union in parent.unions():
        named = [member for member in union.members if member.name == union.scaffold]
        if not union.members:
            problems.add(union.place, "a <union> has no members", "<module> inside")
        elif union.scaffold and not named:
            message = f"the scaffold of a <union> names {union.scaffold!r}, which is not one of its members"
            expected = nearest(union.scaffold, (member.name for member in union.members), "the name of a member")
            problems.add(union.place, message, expected)
        elif named and not named[0].cache:
            message = f"the scaffold of a <union> names {union.scaffold!r}, which is not cached"
            problems.add(union.place, message, "a member that is cached, or no scaffold")


def _check_scaffolds(tree: SchemaTree, problems: Problems) -> None:
    place = tree.scaffold_place or tree.place
    modules = dict(modules_of(tree))
    uncached = {path for path in modules if not all(modules[path[:n]].cache for n in range(1, len(path) + 1))}
    declared: set[frozenset[str]] = set()
    for names in tree.scaffolds:
        paths = [tuple(name.split("/")) for name in names]
        is_known = True
        for name, path in zip(names, paths, strict=True):
            if path not in modules:
                is_known = False
                expected = nearest(name, ("/".join(key) for key in modules), "names of modules, as in 'a b; c a/d'")
                problems.add(place, f"a scaffold names {name!r}, which is not a module of the schema", expected)
            elif path in uncached:
                problems.add(place, f"a scaffold names {name!r}, which is not cached", "modules that are cached")
        text = " ".join(names)
        if len(set(names)) != len(names) or len(names) < 2:
            problems.add(place, f"the scaffold {text!r} has too few modules, or one twice", "two or more modules")
        if frozenset(names) in declared:
            problems.add(place, f"the scaffold {text!r} is declared twice", "each set once")
        declared.add(frozenset(names))
        for path, path2 in combinations(sorted(dict.fromkeys(paths), key=len) if is_known else (), 2):
            both = f"{'/'.join(path)!r} and {'/'.join(path2)!r}"
            at = next((at for at, (name1, name2) in enumerate(zip(path, path2, strict=False)) if name1 != name2), None)
            if at is None:
                message = f"in a scaffold, {both} are nested"
                problems.add(place, message, "modules that do not contain each other")
            elif any(
                {path[at], path2[at]} <= {member.name for member in union.members}
                for union in (modules[path[:at]] if at else tree).unions()
            ):
                message = f"in a scaffold, {both} are in different members of one union"
                problems.add(place, message, "modules that a prompt can import together")


_SPACE = "xml:space"
_WHOLE = re.compile(r"\ufeff?(?:\s+|<!--.*?-->)*(?:<\?|<!DOCTYPE|<(?:prompt|schema)[\s/>])", re.DOTALL)
_LENGTH = re.compile(r"[1-9][0-9]{0,8}")


def parse_schema(text: str, source: str, folder: Path | None) -> SchemaTree:
    """Parse a schema.

    Args:
        text: The document.
        source: Name of the document in source positions.
        folder: Directory of the files of `src`; None: `src` is not allowed.

    Raises:
        PMLError: The schema is invalid; lists all problems.
    """
    problems = Problems()
    root = read_xml("schema", text, source, problems)
    is_whole = not problems.found
    tree = _SchemaParser(folder, problems).schema(root)
    check_schema(tree, problems, whole=is_whole)
    problems.require_none()
    return tree


def parse_prompt(text: str, source: str, problems: Problems, schema: str) -> PromptTree:
    """Parse a prompt of a schema, given as a `<prompt>` element or the content of one.

    Problems are collected; raises a `PMLError` with them if there is no such element.
    """
    around = ("", "") if _WHOLE.match(text) else (f"<prompt schema={quoteattr(schema)}>", "</prompt>")
    return _PromptParser(problems, at_start=False).prompt(read_xml("prompt", text, source, problems, around))


class _Reader:
    """Base of the parsers of schemas and prompts."""

    def __init__(self, problems: Problems, *, at_start: bool) -> None:
        self.problems = problems
        self.flow = Flow(at_start)
        self.preserve = False
        self.role = ""
        """Role of the turn around; empty: there is none."""

    def attributes(self, raw: RawElement, *allowed: str) -> None:
        """Report attributes that are not allowed; `xml:space` always is."""
        for name in raw.attributes:
            if name not in allowed and name != _SPACE:
                message = f"<{raw.tag}> has no attribute {name!r}"
                self.problems.add(raw.places[name], message, nearest(name, allowed, "no attribute"))

    def inside(self, raw: RawElement, read: Callable[[RawElement, list[Any]], object]) -> tuple[Any, ...]:
        """Return the nodes inside an element: texts, and what `read` appends for its elements."""
        space, before, nodes = raw.attributes.get(_SPACE), self.preserve, list[Any]()
        if space not in (None, "default", "preserve"):
            message = f"{_SPACE} is {space!r}"
            self.problems.add(raw.places[_SPACE], message, "'preserve' or 'default'")
        self.preserve = before if space is None else space == "preserve"
        for child in raw.children:
            if isinstance(child, RawText):
                text = self.flow.text(child.text, verbatim=child.verbatim or self.preserve)
                append_text(nodes, text, child.place)
            else:
                read(child, nodes)
        self.preserve = before
        return tuple(nodes)

    def turn(self, raw: RawElement, read: Callable[[RawElement], tuple[Any, ...]]) -> ChatTurn:
        if self.role:
            self.problems.add(raw.place, f"there is a <{raw.tag}> in a <{self.role}>", "a turn in no other")
        around, self.role = self.role, raw.tag
        self.flow.turn()
        children = read(raw)
        self.flow.turn()
        self.role = around
        return ChatTurn(cast(Role, raw.tag), children, raw.place)

    def required(self, raw: RawElement, name: str) -> str:
        value = raw.attributes.get(name, "")
        if name not in raw.attributes:
            self.problems.add(raw.place, f"<{raw.tag}> has no {name}", f'{name}="..."')
        elif not value:
            self.problems.add(raw.places[name], f"the {name} of the <{raw.tag}> is empty", f'{name}="..."')
        return value


class _SchemaParser(_Reader):
    def __init__(self, folder: Path | None, problems: Problems) -> None:
        super().__init__(problems, at_start=True)
        self.folder = folder

    def schema(self, raw: RawElement) -> SchemaTree:
        self.attributes(raw, "name", "scaffold")
        name = self.required(raw, "name")
        children = self.children(raw)
        sets = (tuple(names.split()) for names in raw.attributes.get("scaffold", "").split(";"))
        where = raw.places.get("scaffold")
        return SchemaTree(name, children, raw.place, tuple(names for names in sets if names), where)

    def children(self, raw: RawElement) -> tuple[SchemaNode, ...]:
        """Return the nodes inside an element, or the text of the file that its `src` names."""
        if "src" not in raw.attributes or raw.tag not in ("module", *ROLES):
            return self.inside(raw, self.node)
        place = raw.places["src"]
        for child in raw.children:
            if isinstance(child, RawElement) or child.text.strip():
                self.problems.add(child.place, f"a <{raw.tag}> that includes a file has content", "nothing")
        if self.folder is None:
            self.problems.add(place, "only a schema file can include files", "a folder, or the text itself")
            return ()
        text = self.flow.text(read_included(self.folder, raw.attributes["src"], place, self.problems), verbatim=True)
        return (Text(text, place),) if text else ()

    def node(self, raw: RawElement, nodes: list[SchemaNode]) -> None:
        """Append an element to the nodes before it."""
        if raw.tag == "module":
            nodes.append(self.module(raw))
        elif raw.tag == "union":
            nodes.append(self.union(raw))
        elif raw.tag in ("parameter", "param"):
            self.parameter(raw, nodes)
        elif raw.tag in ROLES:
            self.attributes(raw, "src")
            nodes.append(self.turn(raw, self.children))
        else:
            expected = nearest(raw.tag, TAGS, "escape what is meant as text: &lt;" + raw.tag)
            self.problems.add(raw.place, f"there is no <{raw.tag}> in a schema", expected)
            self.children(raw)  # still parsed, to report problems inside

    def module(self, raw: RawElement) -> Module:
        self.attributes(raw, "name", "src", "cache", "confidential")
        name = self.required(raw, "name")
        cache = self.truth(raw, "cache", otherwise=True)
        confidential = self.truth(raw, "confidential", otherwise=False)
        return Module(name, self.children(raw), raw.place, cache, confidential)

    def union(self, raw: RawElement) -> Union:
        self.attributes(raw, "scaffold")
        for child in raw.children:
            if isinstance(child, RawElement):
                if child.tag != "module":
                    self.problems.add(child.place, f"there is a <{child.tag}> in a <union>", "<module> only")
            elif child.text.strip():
                self.problems.add(child.place, "there is text in a <union>", "<module> only")
            elif child is not raw.children[-1]:
                self.flow.owe(child.text)
        members = [child for child in raw.children if isinstance(child, RawElement) and child.tag == "module"]
        before, after = self.flow, list[Flow]()

        def read(member: RawElement, nodes: list[Module]) -> None:
            self.flow = replace(before)  # each member is parsed as if it were the only one
            nodes.append(self.module(member))
            after.append(self.flow)

        modules = self.inside(replace(raw, children=list(members)), read)
        if after:
            self.flow = Flow(all(flow.at_start for flow in after), max((flow.owed for flow in after), key=len))
        if raw.children and isinstance(last := raw.children[-1], RawText):
            self.flow.owe(last.text)
        return Union(modules, raw.place, raw.attributes.get("scaffold", "").strip())

    def parameter(self, raw: RawElement, nodes: list[SchemaNode]) -> None:
        """Append a parameter to the nodes before it in the same element."""
        self.attributes(raw, "name", "length", "len", "scaffold")
        name = self.required(raw, "name")
        for child in raw.children:
            if isinstance(child, RawElement) or child.text.strip():
                self.problems.add(child.place, f"a <{raw.tag}> has content", "nothing")
        named = [key for key in ("length", "len") if key in raw.attributes]
        if len(named) > 1:
            self.problems.add(raw.places["len"], "the length is given twice", "length or len")
        length = raw.attributes[named[0]].strip() if named else self.required(raw, "length")
        if named and not _LENGTH.fullmatch(length):
            message = f"the {named[0]} of a parameter is {length!r}"
            self.problems.add(raw.places[named[0]], message, "a number of tokens from 1 to 999999999")
        size = int(length) if _LENGTH.fullmatch(length) else 1
        lead = self.flow.lead(nodes, raw.place)
        nodes.append(Parameter(name, size, lead, raw.place, raw.attributes.get("scaffold", "")))

    def truth(self, raw: RawElement, name: str, *, otherwise: bool) -> bool:
        value = raw.attributes.get(name)
        if value not in (None, "true", "false"):
            self.problems.add(raw.places[name], f"{name} is {value!r}", "'true' or 'false'")
        return otherwise if value is None else value == "true"


class _PromptParser(_Reader):
    def prompt(self, raw: RawElement) -> PromptTree:
        schema = self.required(raw, "schema")
        place = raw.places.get("schema", raw.place)
        return PromptTree(schema, self.arguments(raw, "schema"), self.children(raw), place)

    def arguments(self, raw: RawElement, *reserved: str) -> tuple[Argument, ...]:
        own = {name: value for name, value in raw.attributes.items() if name not in (*reserved, _SPACE)}
        return tuple(Argument(name, value, raw.places[name]) for name, value in own.items())

    def children(self, raw: RawElement) -> tuple[PromptNode, ...]:
        return self.inside(raw, self.node)

    def node(self, raw: RawElement, nodes: list[PromptNode]) -> None:
        """Append an element to the nodes before it."""
        if raw.tag in ROLES:
            self.attributes(raw)
            nodes.append(self.turn(raw, lambda turn: self.inside(turn, self.refuse)))
        elif raw.tag in ("prompt", "schema", *TAGS):
            self.problems.add(raw.place, f"there is a <{raw.tag}> in a prompt", "an import, text or a turn")
            self.children(raw)
        else:
            nodes.append(Import(raw.tag, self.arguments(raw), self.children(raw), raw.place))

    def refuse(self, raw: RawElement, _: list[Text]) -> None:
        message = f"there is a <{raw.tag}> in a turn of a prompt"
        self.problems.add(raw.place, message, "text only: imports keep the place that the schema gives them")
