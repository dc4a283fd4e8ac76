"""Random schemas and prompts, a tokenizer of words to lay them out with, and slow ways to say what comes of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from xml.sax.saxutils import quoteattr

from hypothesis import strategies as st

from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.models.chat.format import TurnFormat
from choreo_agents.pml import Schema
from choreo_agents.pml.markup.syntax import (
    ROLES,
    ChatTurn,
    Module,
    Parameter,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Text,
    Union,
)

HERE = SourcePlace("<test>", 1, 1)
CHAT = ChatFormat("<s>", *(TurnFormat(f"<|{role}|> ", None, "<|end|>") for role in ("system", "user", "assistant")))
_PIECES = re.compile(r"<\|?\w+\|?>| ?\w+| ?[^\s\w]|\s")


class WordModel:
    """As much of a model as schemas are compiled with: each word is a token, with the blank before it."""

    def __init__(self, context: int | None = None, unknown: int | None = 0) -> None:
        self.words = ["<unk>"]
        self.chat = CHAT
        self.adapter = SimpleNamespace(max_positions=context, end_tokens=(7,))
        self.tokenizer = SimpleNamespace(unk_token_id=unknown, pad_token_id=None)

    def encode(self, text: str | PromptText) -> list[int]:
        tokens = []
        for word in _PIECES.findall(str(text)):
            if word not in self.words:
                self.words.append(word)
            tokens.append(self.words.index(word))
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        return "".join(self.words[token] for token in tokens)

    def loaded(self) -> LoadedModel:
        return cast(LoadedModel, self)


NAMES = ("a", "b", "c.py", "d-e", "_f", "é", "plan")
texts = st.text(
    st.sampled_from(" \n\t\rab.<>&]\"'é🙂\u00a0\u2028") | st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]),
    max_size=12,
).filter(lambda text: not re.search("[\ufffe\uffff]", text))
"""Whatever XML can hold, mostly what it has trouble with."""
words = st.lists(st.sampled_from(["one", "two.", "x<y", "&", "\n\n", "  "]), max_size=5).map(" ".join)
lengths = st.integers(1, 9)


@st.composite
def nodes(draw: st.DrawFn, text: st.SearchStrategy[str], depth: int, *, turns: bool) -> tuple[SchemaNode, ...]:
    """What stands in a module, or a schema, with its parameters."""
    names, slots = iter(draw(st.permutations(NAMES))), iter(("p0", "p1", "p2"))

    def some(depth: int, turns: bool) -> tuple[SchemaNode, ...]:
        found: list[SchemaNode] = []
        for kind in draw(st.lists(st.sampled_from("ttsmuTp"), max_size=4)):
            if kind == "t":
                add_text(found, draw(text))
            elif kind == "s" and (slot := next(slots, None)) is not None:
                add_text(found, draw(text))
                found.append(Parameter(slot, draw(lengths), taken_lead(found), HERE))
                add_text(found, draw(text))
            elif kind == "m" and depth:
                name = next(names, None)
                found += [] if name is None else [draw(modules(text, name, depth - 1, turns=turns))]
            elif kind == "u" and depth:
                members = [name for name, _ in zip(names, range(draw(st.integers(1, 3))), strict=False)]
                made = tuple(draw(modules(text, name, depth - 1, turns=turns)) for name in members)
                found += [Union(made, HERE)] if made else []
            elif kind == "T" and turns:
                inner = some(depth - 1 if depth else 0, False)
                found.append(ChatTurn(draw(st.sampled_from(ROLES)), inner, HERE))
        return tuple(found)

    return some(depth, turns)


def add_text(before: list[SchemaNode], text: str) -> None:
    """Adjacent texts are one."""
    if text and before and isinstance(last := before[-1], Text):
        before[-1] = Text(last.text + text, HERE)
    elif text:
        before.append(Text(text, HERE))


def taken_lead(before: list[SchemaNode]) -> str:
    """The blank before a parameter belongs to its argument."""
    last = before[-1] if before else None
    if not isinstance(last, Text) or not last.text.endswith(" "):
        return ""
    before[-1:] = [Text(last.text[:-1], HERE)] if last.text[:-1] else []
    return " "


@st.composite
def modules(draw: st.DrawFn, text: st.SearchStrategy[str], name: str, depth: int, *, turns: bool) -> Module:
    inside = draw(nodes(text, depth, turns=turns))
    cache, confidential = draw(st.tuples(st.sampled_from([True, True, False]), st.booleans()))
    return Module(name, inside, HERE, cache, confidential)


@st.composite
def schemas(draw: st.DrawFn, text: st.SearchStrategy[str] = texts) -> Schema:
    return Schema(SchemaTree("s", draw(nodes(text, 3, turns=True)), HERE))


@st.composite
def rows_of_modules(draw: st.DrawFn, text: st.SearchStrategy[str]) -> Schema:
    """A schema of several modules with text between."""
    inside: list[SchemaNode] = []
    for name in NAMES[: draw(st.integers(2, 4))]:
        add_text(inside, draw(text))
        inside.append(replace(draw(modules(text, name, 1, turns=False)), cache=True))
    return Schema(SchemaTree("s", tuple(inside), HERE))


def pml_of(tree: SchemaTree) -> str:
    """PML that is read as a tree, with every text to the letter."""

    def attributes(**values: object) -> str:
        return "".join(f" {name}={quoteattr(str(value))}" for name, value in values.items() if value)

    def verbatim(text: str) -> str:
        parts = (part.replace("]]>", "]]]]><![CDATA[>") for part in text.split("\r"))
        return "&#13;".join(f"<![CDATA[{part}]]>" if part else "" for part in parts)

    def inside(children: tuple[SchemaNode, ...]) -> str:
        return "".join(map(written_node, children))

    def written_node(node: SchemaNode) -> str:
        match node:
            case Text():
                return verbatim(node.text)
            case Parameter():
                own = attributes(name=node.name, length=node.length, scaffold=node.scaffold)
                return f"{verbatim(node.lead)}<parameter{own}/>"
            case Module():
                flags = {} if node.cache else {"cache": "false"}
                flags |= {"confidential": "true"} if node.confidential else {}
                return f"<module{attributes(name=node.name, **flags)}>{inside(node.children)}</module>"
            case Union():
                return f"<union{attributes(scaffold=node.scaffold)}>{inside(node.members)}</union>"
            case ChatTurn():
                return f"<{node.role}>{inside(node.children)}</{node.role}>"

    scaffold = "; ".join(" ".join(names) for names in tree.scaffolds)
    return f"<schema{attributes(name=tree.name, scaffold=scaffold)}>{inside(tree.children)}</schema>"


@st.composite
def imports(draw: st.DrawFn, parent: SchemaTree | Module, values: st.SearchStrategy[str]) -> str:
    """Random PML of what a prompt imports inside a module, with text between."""
    found: list[str] = []
    for node in every(parent.children):
        chosen = node
        if isinstance(node, Union):
            chosen = draw(st.sampled_from(node.members))
        if isinstance(chosen, Module) and draw(st.booleans()):
            given = [each for each in every(chosen.children) if isinstance(each, Parameter) and draw(st.booleans())]
            attributes = "".join(f' {each.name}="{draw(values)}"' for each in given)
            found.append(f"<{chosen.name}{attributes}>{draw(imports(chosen, values))}</{chosen.name}>")
    found = list(draw(st.permutations(found)))
    for _ in range(draw(st.integers(0, 2))):
        text = draw(st.sampled_from([" free text", "words", "<user>asked</user>"]))
        found.insert(draw(st.integers(0, len(found))), text)
    return "".join(found)


def every(children: tuple[SchemaNode, ...]) -> Iterator[SchemaNode]:
    """What stands in a module, turns taken apart."""
    for child in children:
        if isinstance(child, ChatTurn):
            yield from every(child.children)
        else:
            yield child


Written = tuple[tuple[str, ...], str, int]
"""A text or slot: the module that it is in, what it says, its tokens."""


def written(tree: SchemaTree, model: WordModel, chosen: dict[int, int]) -> list[Written]:
    """A schema's texts and slots in a row, when of each union (by `id`) one member is taken.

    Says in another way what `layout` says: it writes the whole document first, as one string with marks.
    """
    out: list[str] = [CHAT.bos]

    def write(children: tuple[SchemaNode, ...], path: tuple[str, ...]) -> None:
        for child in children:
            if isinstance(child, Text):
                out.append(child.text)
            elif isinstance(child, Parameter):
                out.append(f"\1{child.name}\2{child.length}\1")
            elif isinstance(child, ChatTurn):
                out.extend([f"<|{child.role}|>", "\3"])
                write(child.children, path)
                out.extend(["\4", "<|end|>"])
            else:
                member = child.members[chosen[id(child)]] if isinstance(child, Union) else child
                assert isinstance(member, Module)
                out.append(f"\5{'/'.join((*path, member.name))}\5")
                write(member.children, (*path, member.name))
                out.append(f"\5{'/'.join(path)}\5")

    write(tree.children, ())
    whole = "".join(out)
    # The blank of a turn's opening goes to the first words of the turn, unless they bring their own.
    whole = re.sub("\3((?:\5[^\5]*\5)*)(?=[^\\s\1\4\5])", r"\1 ", whole)
    whole = re.sub("[\3\4]", "", whole)
    found: list[Written] = []
    path: tuple[str, ...] = ()
    for number, section in enumerate(whole.split("\5")):
        if number % 2:
            path = tuple(filter(None, section.split("/")))
            continue
        for inner, said in enumerate(section.split("\1")):
            if inner % 2:
                found.append((path, said, int(said.split("\2")[1])))
            elif tokens := model.encode(said):
                found.append((path, said, len(tokens)))
    return found


def all_choices(tree: SchemaTree) -> Iterator[dict[int, int]]:
    """Every way to take one member of each union."""
    unions: list[Union] = []

    def find(children: tuple[SchemaNode, ...]) -> None:
        for child in every(children):
            if isinstance(child, Union):
                unions.append(child)
                find(child.members)
            elif isinstance(child, Module):
                find(child.children)

    find(tree.children)
    for numbers in product(*(range(len(each.members)) for each in unions)):
        yield {id(each): number for each, number in zip(unions, numbers, strict=True)}


def other_words(tree: SchemaTree, path: tuple[str, ...]) -> SchemaTree:
    """The same schema with as many other words in one module, and in all inside it."""

    def changed(children: tuple[SchemaNode, ...], here: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(change(child, here) for child in children)

    def change(node: SchemaNode, here: tuple[str, ...]) -> SchemaNode:
        if isinstance(node, Text) and here[: len(path)] == path:
            return replace(node, text=node.text.replace("one", "six").replace("two", "ten"))
        if isinstance(node, Module):
            return replace(node, children=changed(node.children, (*here, node.name)))
        if isinstance(node, ChatTurn):
            return replace(node, children=changed(node.children, here))
        return replace(node, members=changed(node.members, here)) if isinstance(node, Union) else node

    return replace(tree, children=changed(tree.children, ()))


EXTRA = (
    "<", ">", "&", "]]>", "<![CDATA[", "<union>", "</module>", "&#0;", "&x;", '"', "\0", "\ud800", "\r", "<!--", "é",
    "<module name='a'>", "<parameter name='p' len='99999999999999'/>", " xml:space='x'", "<!DOCTYPE a>", "/",
)  # fmt: skip


def mutated(rng: random.Random, text: str) -> str:
    """The same with a few characters or tags lost, doubled, moved or put in."""
    parts = re.split(r"(<[^<>]*>)", text) if rng.random() < 0.5 else list(text)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(parts))
        action = rng.randrange(4)
        if action == 0:
            parts.insert(at, rng.choice(EXTRA))
        elif action == 1:
            del parts[at : at + rng.randint(1, 3)]
        elif action == 2:
            parts[at:at] = parts[at : at + rng.randint(1, 8)]
        elif parts:
            parts.insert(at, parts.pop(rng.randrange(len(parts))))
    return "".join(parts)
