"""Turns a schema into the pieces that a model encodes, each at its positions, once and by a prefill of its own.

Positions are as a model's chat template writes the schema (Prompt Cache, 3.3). Everything starts where what is written
before it ends. Members of a union share a start, and the longest of them says where the union ends. A parameter takes
as many positions as its length says, whatever the argument. So a module has one start, which no prompt changes: a
module that is not imported, a shorter member, a shorter or missing argument leave gaps.

     0         7      9            14        20
     ├─ text ──┼─slot─┼── union ───┼── text ─┤
                      ├─ long ─────┤
                      ├─ short ─┤ gap

What a piece attends to: the text and slots of its own module, of the modules that this is in, and of the schema itself,
as far as they are written before it. Never a sibling, and never what is written after it: an ancestor's text that comes
after a module is not seen by it, and is itself encoded without the module, which a prompt may leave out. Members of a
scaffold see, besides, the own text and slots of the members that are written before them; so does what is inside them.
The scaffold of a union is the one member that is seen by what comes after the union, as it would be if a prompt had
imported it.

A piece ends where a slot, a module or a union starts, and a slot is a piece of its own, made of placeholder tokens. So
a view holds whole pieces only: that of a filled slot is left out of it, and the argument's tokens stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.syntax import (
    ChatTurn,
    Module,
    Parameter,
    Path,
    SchemaNode,
    SchemaTree,
    SourcePlace,
    Text,
    Union,
)
from choreo_agents.pml.schema import Schema

Encode = Callable[[PromptText], list[int]]


@dataclass(frozen=True)
class _Placed:
    """Positions."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TextSpan(_Placed):
    """Tokens that stand together: the schema's words, and the template's frames."""

    text: str
    tokens: tuple[int, ...]
    ends: bool = False
    """Whether it closes a user's turn, where users and model must take turns: then nothing is joined to it."""


@dataclass(frozen=True)
class SlotSpan(_Placed):
    """The positions that a parameter holds."""

    name: str
    lead: str
    """Is encoded before an argument, as one text with it: a blank, or nothing."""
    place: SourcePlace
    tokens: tuple[int, ...]
    """Of the text that holds its place; none: nothing in particular does."""


@dataclass(frozen=True)
class ModuleSpan(_Placed):
    """The positions of a module, or of the whole schema, whose path is empty."""

    path: Path
    children: tuple[Span, ...]
    place: SourcePlace
    cached: bool
    confidential: bool
    """Both count for all that is inside."""
    open_ends: tuple[int, ...] = ()
    """Where users' turns end that nothing closes."""

    def modules(self) -> Iterator[ModuleSpan]:
        """This and every module inside, in the order in which they are written."""
        yield self
        for child in self.children:
            for module in child.members if isinstance(child, UnionSpan) else (child,):
                if isinstance(module, ModuleSpan):
                    yield from module.modules()

    def own(self) -> Iterator[TextSpan | SlotSpan]:
        """Its own texts and slots: not those of modules inside."""
        return (child for child in self.children if isinstance(child, TextSpan | SlotSpan))


@dataclass(frozen=True)
class UnionSpan(_Placed):
    """The positions that members of a union share."""

    members: tuple[ModuleSpan, ...]
    scaffold: str
    """The member that stands there for what comes after it; empty: none."""


Span = TextSpan | SlotSpan | ModuleSpan | UnionSpan


def lay_out(tree: SchemaTree, chat: ChatFormat, encode: Encode) -> ModuleSpan:
    """Give everything in a schema its positions, behind what a template writes at the start of every conversation.

    A blank that the template puts before a turn's words belongs to the first of them, wherever that stands: modules
    get it if they come first. Such is the way tokenizers read.
    """
    writing = _Writing(chat, encode, (), tree.place, 0, cached=True, confidential=False)
    writing.write(PromptText.special(chat.bos))
    return writing.done(tree.children)


@dataclass
class _Writing:
    """Writes the schema, or a module of it, from a position on."""

    chat: ChatFormat
    encode: Encode
    path: Path
    place: SourcePlace
    start: int
    cached: bool
    confidential: bool
    owed: str = ""
    """The blank that the next words start with, unless they bring whitespace of their own."""
    spans: list[Span] = field(default_factory=list)
    open_ends: list[int] = field(default_factory=list)
    words: PromptText | None = None
    """What stands last, and may go on, ..."""
    closing: PromptText | None = None
    """... unless this closes the user's turn that it ends, if only nothing."""

    @property
    def at(self) -> int:
        """The position of what comes next, once what stands last has its own."""
        return self.spans[-1].end if self.spans else self.start

    def done(self, children: tuple[SchemaNode, ...]) -> ModuleSpan:
        self.add(children)
        self._settle()
        where, ends = (self.start, self.at - self.start, self.path, tuple(self.spans)), tuple(self.open_ends)
        return ModuleSpan(*where, self.place, self.cached, self.confidential, ends)

    def add(self, children: tuple[SchemaNode, ...]) -> None:
        for child in children:
            if isinstance(child, Text):
                self.write(PromptText.plain(child.text))
            elif isinstance(child, ChatTurn):
                self._turn(child)
            else:
                self._settle()
                self.spans.append(self._span(child))
                self.owed = ""

    def _span(self, node: Parameter | Module | Union) -> Span:
        if isinstance(node, Parameter):
            lead = node.lead or self.owed
            held = self.encode(PromptText.plain(lead + node.scaffold)) if node.scaffold else ()
            return SlotSpan(self.at, node.length, node.name, lead, node.place, tuple(held))
        if isinstance(node, Module):
            return self._inner(node)
        members = tuple(self._inner(member) for member in node.members)
        return UnionSpan(self.at, max((each.length for each in members), default=0), members, node.scaffold)

    def write(self, text: PromptText) -> None:
        """Append words to those that stand right before."""
        if text:
            text = text if text.text[0].isspace() else PromptText.special(self.owed) + text
            self.owed = ""
            if self.closing is not None:
                self._settle()
            self.words = text if self.words is None else self.words + text

    def _turn(self, turn: ChatTurn) -> None:
        # Where instructions stand in the first user's turn, a turn of them is a user's.
        system = self.chat.user if self.chat.leads else self.chat.system
        form = {"system": system, "user": self.chat.user, "assistant": self.chat.assistant}[turn.role]
        is_users, opening = self.chat.merges is not None and form is self.chat.user, form.plain
        if is_users and self.closing is not None:
            # Right behind another turn of a user's, which is opened again.
            self.closing, opening = None, str(self.chat.merges)
        bare = opening.rstrip(" ")
        self.write(PromptText.special(bare))
        self.owed = opening[len(bare) :]
        self.add(turn.children)
        self.owed, after = "", PromptText.special(form.after)
        if is_users:
            if self.closing is not None:
                self._settle()
            self.closing = after
        else:
            self.write(after)

    def _settle(self) -> None:
        """Give what stands last its positions."""
        for text, ends in ((self.words, False), (self.closing, True)):
            if text is not None and (tokens := tuple(self.encode(text))):
                self.spans.append(TextSpan(self.at, len(tokens), text.text, tokens, ends))
            elif text is not None and ends:
                self.open_ends.append(self.at)
        self.words = self.closing = None

    def _inner(self, module: Module) -> ModuleSpan:
        cached, confidential = self.cached and module.cache, self.confidential or module.confidential
        where = ((*self.path, module.name), module.place, self.at)
        return _Writing(self.chat, self.encode, *where, cached, confidential, self.owed).done(module.children)


PieceKey = str
"""`plan/miami#0`: the first piece of a module, texts and slots counted; `#0`: of the schema. In a scaffold, its
members follow: `plan/miami#0 [hotel plan/miami]`."""
Scaffold = tuple[Path, ...]
"""Modules that are encoded together, in the order of their positions."""


@dataclass(frozen=True)
class SchemaPiece:
    """One span of tokens that is encoded by one prefill."""

    key: PieceKey
    module: Path
    """Whose text or slot it is; () for the schema's."""
    tokens: tuple[int, ...]
    """Of a slot: the text of its scaffold, and placeholders, as many as it is long."""
    start: int
    """The position of its first token, in every prompt; also its offset in the views of pieces that attend to it."""
    parents: tuple[PieceKey, ...]
    """What it attends to, in the order of positions."""
    slot: SlotSpan | None
    """What argument it holds the place of, if it is a slot."""
    cached: bool
    """False: it is not to be encoded beforehand; no cached piece attends to it."""
    confidential: bool
    """Whether its module, one that this is in, or anything that it attends to is confidential."""
    scaffold: Scaffold | None = None
    """The scaffold that this is a variant for; None: the plain piece."""


@dataclass(frozen=True)
class CompiledSchema:
    """A schema's pieces and positions for one model."""

    schema: Schema
    pieces: Mapping[PieceKey, SchemaPiece]
    """Parents before what attends to them."""
    layout: ModuleSpan
    scaffolds: tuple[Scaffold, ...]
    """The largest first."""
    keys: Mapping[tuple[Path, Scaffold | None], tuple[PieceKey, ...]]
    """A module's own pieces, in the order of their positions; of a scaffold's first member, the plain ones."""

    def cached_pieces(self) -> Iterator[SchemaPiece]:
        """All that can be encoded beforehand, parents first."""
        return (piece for piece in self.pieces.values() if piece.cached)


def compile_schema(schema: Schema, model: LoadedModel) -> CompiledSchema:
    """Tokenize a schema for a model, and give each piece its position (Prompt Cache, section 3.3).

    Args:
        schema: What to compile.
        model: Whose tokenizer and chat template are used. Slots are encoded with the tokenizer's unknown token, or,
            where there is none, that which pads or ends.

    Raises:
        PMLError: The schema is longer than the model's context, or the scaffold of a parameter than its length.
    """
    layout = lay_out(schema.tree, model.chat, model.encode)
    problems = Problems()
    check_length(problems, model, schema.tree.place, f"schema {schema.name!r}", layout.length)
    _check_room(problems, layout)
    problems.require_none()
    scaffolds = _scaffolds(schema, layout)
    pieces = _Pieces(placeholder_of(model))
    pieces.add(layout, ())
    modules = {module.path: module for module in layout.modules()}
    for scaffold in scaffolds:
        pieces.add_together(scaffold, modules)
    return CompiledSchema(schema, MappingProxyType(pieces.made), layout, scaffolds, MappingProxyType(pieces.own))


def placeholder_of(model: LoadedModel) -> int:
    """The token that stands for nothing in particular."""
    tokenizer = model.tokenizer
    known = (tokenizer.unk_token_id, tokenizer.pad_token_id, *model.adapter.end_tokens)
    return next((int(token) for token in known if token is not None), 0)


def check_length(problems: Problems, model: LoadedModel, place: SourcePlace, what: str, length: int) -> None:
    """Add it to the problems if something is longer than the model's context."""
    limit = model.adapter.max_positions
    if limit is not None and length > limit:
        message = f"{what} takes {length} positions, the model's context has {limit}"
        problems.add(place, message, f"at most {limit} tokens")


def _check_room(problems: Problems, layout: ModuleSpan) -> None:
    """Add all scaffolds of parameters that are longer than these."""
    for slot in (span for module in layout.modules() for span in module.own() if isinstance(span, SlotSpan)):
        if len(slot.tokens) > slot.length:
            message = f"the scaffold of parameter {slot.name!r} has {len(slot.tokens)} tokens"
            problems.add(slot.place, message, f"at most its length, {slot.length}: raise that, or shorten the scaffold")


def _scaffolds(schema: Schema, layout: ModuleSpan) -> tuple[Scaffold, ...]:
    order = {module.path: number for number, module in enumerate(layout.modules())}
    found = [tuple(sorted((tuple(n.split("/")) for n in names), key=order.__getitem__)) for names in schema.scaffolds]
    return tuple(sorted(found, key=len, reverse=True))


class _Pieces:
    """Makes pieces, each after all that it attends to."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self.made: dict[PieceKey, SchemaPiece] = {}
        self.own: dict[tuple[Path, Scaffold | None], tuple[PieceKey, ...]] = {}
        self.before: dict[Path, tuple[PieceKey, ...]] = {}
        """What a module's first piece attends to when no scaffold is used."""
        self._standing: dict[PieceKey, tuple[Path, ...]] = {}
        """Of pieces that stand for unions: their members, of which a scaffold of the schema may name others."""
        self.scaffold: Scaffold | None = None
        """Whose pieces are made; None: the plain ones."""

    def add(self, module: ModuleSpan, seen: tuple[PieceKey, ...]) -> None:
        """Make the pieces of a module that comes after `seen`, and of all modules inside."""
        if self.scaffold is None:
            self.before[module.path] = seen
        own: list[PieceKey] = []
        for child in module.children:
            match child:
                case TextSpan() | SlotSpan():
                    own.append(self._make(module, child, len(own), seen))
                    seen = (*seen, own[-1])
                case ModuleSpan():
                    self.add(child, seen)
                case UnionSpan():
                    for member in child.members:
                        self.add(member, seen)
                    seen = (*seen, *self._standing_in(child))
        self.own[module.path, self.scaffold] = tuple(own)

    def _standing_in(self, union: UnionSpan, around: tuple[Path, ...] = ()) -> Iterator[PieceKey]:
        """What of a union is seen by what comes after it: the member that its scaffold names."""
        members = (*around, *(each.path for each in union.members))
        for member in (each for each in union.members if each.path[-1] == union.scaffold):
            own = iter(self.own[member.path, self.scaffold])
            for child in member.children:
                if isinstance(child, TextSpan | SlotSpan):
                    key = next(own)
                    self._standing[key] = members
                    yield key
                elif isinstance(child, UnionSpan):
                    yield from self._standing_in(child, members)

    def add_together(self, scaffold: Scaffold, modules: Mapping[Path, ModuleSpan]) -> None:
        """Make the pieces of a scaffold's members; the first is encoded as it is without a scaffold."""
        first, *others = scaffold
        self.scaffold = scaffold
        for module in modules[first].modules():
            self.own[module.path, scaffold] = self.own[module.path, None]
        together = dict.fromkeys(self.own[first, None])
        for path in others:
            seen, before = list(together), [key for key in self.before[path] if key not in together]
            before = [key for key in before if not self._is_replaced(key, scaffold)]
            if before:  # members stand one behind the other: only what they are in comes between
                seen = sorted([*before, *seen], key=lambda key: self.made[key].start)
            self.add(modules[path], tuple(seen))
            together |= dict.fromkeys(self.own[path, scaffold])

    def _is_replaced(self, key: PieceKey, scaffold: Scaffold) -> bool:
        """Whether a piece stands for a union of which a scaffold has another member, or the same one anew."""
        members, module = self._standing.get(key, ()), self.made[key].module
        others = [each for each in members if module[: len(each)] != each]
        return bool(members) and (module in scaffold or any(path[: len(o)] == o for o in others for path in scaffold))

    def _make(self, module: ModuleSpan, span: TextSpan | SlotSpan, number: int, seen: tuple[PieceKey, ...]) -> PieceKey:
        together = "" if self.scaffold is None else f" [{' '.join('/'.join(path) for path in self.scaffold)}]"
        key = f"{'/'.join(module.path)}#{number}{together}"
        slot = span if isinstance(span, SlotSpan) else None
        tokens = (*span.tokens, *(self.fill,) * (span.length - len(span.tokens)))
        confidential = module.confidential or any(self.made[parent].confidential for parent in seen)
        made = (key, module.path, tokens, span.start, seen, slot, module.cached, confidential, self.scaffold)
        self.made[key] = SchemaPiece(*made)
        return key
