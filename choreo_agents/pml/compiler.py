"""Compiler of schemas: gives each piece of a schema its tokens, positions and parents for one model.

Each piece is encoded once, by a prefill of its own. Positions follow the text as the model's chat template writes it
(Prompt Cache, 3.3). Members of a union share a start, and the longest of them decides where the union ends. A parameter
takes `length` positions, whatever the argument. So a module has one start, which no prompt changes: modules that are
not imported, shorter members, and shorter or missing arguments leave gaps.

     0         7      9            14        20
     ├─ text ──┼─slot─┼── union ───┼── text ─┤
                      ├─ long ─────┤
                      ├─ short ─┤ gap

A piece attends to the text and slots that are written before it in its own module, in the modules around it, and in the
schema itself. It never attends to a sibling: a prompt may leave modules out, so text after a module is encoded without
it. Members of a scaffold, and the modules inside them, also attend to the text and slots of the members before them.
The scaffold of a union is the one member that text after the union attends to, as if a prompt had imported it.

A piece ends where a slot, a module or a union starts. A slot is a piece of its own, made of placeholder tokens. So a
view contains whole pieces only: an argument's tokens replace the piece of its slot.
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
    """Range of positions."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TextSpan(_Placed):
    """Consecutive tokens: text of the schema, and of the chat template around it."""

    text: str
    tokens: tuple[int, ...]
    ends: bool = False
    """Whether it closes a user's turn and turns must alternate: it is a span of its own, which a prompt can omit."""


@dataclass(frozen=True)
class SlotSpan(_Placed):
    """Positions of a parameter."""

    name: str
    lead: str
    """Blank, or nothing, that is encoded before an argument as one text with it."""
    place: SourcePlace
    tokens: tuple[int, ...]
    """Tokens of the parameter's scaffold, or none."""


@dataclass(frozen=True)
class ModuleSpan(_Placed):
    """Positions of a module, or of the whole schema, whose path is empty."""

    path: Path
    children: tuple[Span, ...]
    place: SourcePlace
    cached: bool
    confidential: bool
    """`cached` and `confidential` apply to everything inside."""
    open_ends: tuple[int, ...] = ()
    """Ends of users' turns that have no closing text."""

    def modules(self) -> Iterator[ModuleSpan]:
        """Yield this and every module inside, in the order of the text."""
        yield self
        for child in self.children:
            for module in child.members if isinstance(child, UnionSpan) else (child,):
                if isinstance(module, ModuleSpan):
                    yield from module.modules()

    def own(self) -> Iterator[TextSpan | SlotSpan]:
        """Return its own texts and slots, without those of modules inside."""
        return (child for child in self.children if isinstance(child, TextSpan | SlotSpan))


@dataclass(frozen=True)
class UnionSpan(_Placed):
    """Positions that the members of a union share."""

    members: tuple[ModuleSpan, ...]
    scaffold: str
    """Name of the member that text after the union attends to; empty: none."""


Span = TextSpan | SlotSpan | ModuleSpan | UnionSpan


def lay_out(tree: SchemaTree, chat: ChatFormat, encode: Encode) -> ModuleSpan:
    """Give everything in a schema its positions, after the text with which the template starts a conversation.

    A blank that the template puts before a turn's text belongs to the first word, even if that is inside a module: this
    is how tokenizers split text.
    """
    writing = _Writing(chat, encode, (), tree.place, 0, cached=True, confidential=False)
    writing.write(PromptText.special(chat.bos))
    return writing.finish(tree.children)


@dataclass
class _Writing:
    """Writer of the spans of the schema, or of a module, from a position on."""

    chat: ChatFormat
    encode: Encode
    path: Path
    place: SourcePlace
    start: int
    cached: bool
    confidential: bool
    owed: str = ""
    """Blank before the next text, unless that starts with whitespace."""
    spans: list[Span] = field(default_factory=list)
    open_ends: list[int] = field(default_factory=list)
    words: PromptText | None = None
    """Text at the end that has no positions yet and may still be extended."""
    closing: PromptText | None = None
    """Closing of a user's turn after `words`, perhaps empty; None: `words` may be extended."""

    @property
    def at(self) -> int:
        """Position after the last span."""
        return self.spans[-1].end if self.spans else self.start

    def finish(self, children: tuple[SchemaNode, ...]) -> ModuleSpan:
        self.add(children)
        self._flush()
        where, ends = (self.start, self.at - self.start, self.path, tuple(self.spans)), tuple(self.open_ends)
        return ModuleSpan(*where, self.place, self.cached, self.confidential, ends)

    def add(self, children: tuple[SchemaNode, ...]) -> None:
        for child in children:
            if isinstance(child, Text):
                self.write(PromptText.plain(child.text))
            elif isinstance(child, ChatTurn):
                self._add_turn(child)
            else:
                self._flush()
                self.spans.append(self._make_span(child))
                self.owed = ""

    def _make_span(self, node: Parameter | Module | Union) -> Span:
        if isinstance(node, Parameter):
            lead = node.lead or self.owed
            tokens = self.encode(PromptText.plain(lead + node.scaffold)) if node.scaffold else ()
            return SlotSpan(self.at, node.length, node.name, lead, node.place, tuple(tokens))
        if isinstance(node, Module):
            return self._write_module(node)
        members = tuple(self._write_module(member) for member in node.members)
        return UnionSpan(self.at, max((member.length for member in members), default=0), members, node.scaffold)

    def write(self, text: PromptText) -> None:
        """Append text to the text right before it."""
        if text:
            text = text if text.text[0].isspace() else PromptText.special(self.owed) + text
            self.owed = ""
            if self.closing is not None:
                self._flush()
            self.words = text if self.words is None else self.words + text

    def _add_turn(self, turn: ChatTurn) -> None:
        # If the template puts the system prompt into the first user's turn, a system turn is a user's.
        system = self.chat.user if self.chat.leads else self.chat.system
        form = {"system": system, "user": self.chat.user, "assistant": self.chat.assistant}[turn.role]
        is_users, opening = self.chat.merges is not None and form is self.chat.user, form.plain
        if is_users and self.closing is not None:
            # Directly after another user's turn: it is reopened, since turns must alternate.
            self.closing, opening = None, str(self.chat.merges)
        bare = opening.rstrip(" ")
        self.write(PromptText.special(bare))
        self.owed = opening[len(bare) :]
        self.add(turn.children)
        self.owed, after = "", PromptText.special(form.after)
        if is_users:
            if self.closing is not None:
                self._flush()
            self.closing = after
        else:
            self.write(after)

    def _flush(self) -> None:
        """Give the text at the end its positions."""
        for text, ends in ((self.words, False), (self.closing, True)):
            if text is not None and (tokens := tuple(self.encode(text))):
                self.spans.append(TextSpan(self.at, len(tokens), text.text, tokens, ends))
            elif text is not None and ends:
                self.open_ends.append(self.at)
        self.words = self.closing = None

    def _write_module(self, module: Module) -> ModuleSpan:
        cached, confidential = self.cached and module.cache, self.confidential or module.confidential
        where = ((*self.path, module.name), module.place, self.at)
        return _Writing(self.chat, self.encode, *where, cached, confidential, self.owed).finish(module.children)


PieceKey = str
"""`plan/miami#0` is the first text or slot of a module, `#0` that of the schema. Variants for a scaffold add its
members: `plan/miami#0 [hotel plan/miami]`."""
Scaffold = tuple[Path, ...]
"""Paths of modules that are encoded together, in the order of their positions."""


@dataclass(frozen=True)
class SchemaPiece:
    """A span of tokens that is encoded by one prefill."""

    key: PieceKey
    module: Path
    """Path of its module; () for the schema."""
    tokens: tuple[int, ...]
    """For a slot: the tokens of its scaffold, filled up with placeholders to its length."""
    start: int
    """Position of its first token, the same in every prompt and in the views of other pieces."""
    parents: tuple[PieceKey, ...]
    """Keys of the pieces that it attends to, in the order of positions."""
    slot: SlotSpan | None
    """The slot, if it is one."""
    cached: bool
    """False: it is encoded with every prompt, and no cached piece attends to it."""
    confidential: bool
    """Whether its module, a module around it, or anything that it attends to is confidential."""
    scaffold: Scaffold | None = None
    """Scaffold for which it is a variant; None: the plain piece."""


@dataclass(frozen=True)
class CompiledSchema:
    """A schema's pieces and positions for one model."""

    schema: Schema
    pieces: Mapping[PieceKey, SchemaPiece]
    """Pieces by key, parents first."""
    layout: ModuleSpan
    scaffolds: tuple[Scaffold, ...]
    """Largest first."""
    keys: Mapping[tuple[Path, Scaffold | None], tuple[PieceKey, ...]]
    """Keys of a module's own pieces, in order; a scaffold's first member has the plain ones."""

    def cached_pieces(self) -> Iterator[SchemaPiece]:
        """Return the pieces that can be encoded in advance, parents first."""
        return (piece for piece in self.pieces.values() if piece.cached)


def compile_schema(schema: Schema, model: LoadedModel) -> CompiledSchema:
    """Tokenize a schema for a model, and give each piece its position (Prompt Cache, section 3.3).

    Args:
        schema: The schema.
        model: Model whose tokenizer and chat template are used. Slots are filled with the tokenizer's unknown token, or
            else its padding or end token.

    Raises:
        PMLError: The schema is longer than the model's context, or a parameter's scaffold than its length.
    """
    layout = lay_out(schema.tree, model.chat, model.encode)
    problems = Problems()
    check_length(problems, model, schema.tree.place, f"schema {schema.name!r}", layout.length)
    _check_slot_scaffolds(problems, layout)
    problems.require_none()
    scaffolds = _scaffolds(schema, layout)
    pieces = _Pieces(placeholder_of(model))
    pieces.add(layout, ())
    modules = {module.path: module for module in layout.modules()}
    for scaffold in scaffolds:
        pieces.add_together(scaffold, modules)
    return CompiledSchema(schema, MappingProxyType(pieces.by_key), layout, scaffolds, MappingProxyType(pieces.own))


def placeholder_of(model: LoadedModel) -> int:
    """Return the token that fills slots: unknown, padding or end token."""
    tokenizer = model.tokenizer
    candidates = (tokenizer.unk_token_id, tokenizer.pad_token_id, *model.adapter.end_tokens)
    return next((int(token) for token in candidates if token is not None), 0)


def check_length(problems: Problems, model: LoadedModel, place: SourcePlace, label: str, length: int) -> None:
    """Add a problem if something is longer than the model's context."""
    limit = model.adapter.max_positions
    if limit is not None and length > limit:
        message = f"{label} takes {length} positions, but the model's context is {limit}"
        problems.add(place, message, f"at most {limit} tokens")


def _check_slot_scaffolds(problems: Problems, layout: ModuleSpan) -> None:
    """Add a problem for every parameter whose scaffold is longer than its length."""
    for slot in (span for module in layout.modules() for span in module.own() if isinstance(span, SlotSpan)):
        if len(slot.tokens) > slot.length:
            message = f"the scaffold of parameter {slot.name!r} has {len(slot.tokens)} tokens"
            problems.add(slot.place, message, f"at most its length, {slot.length}: raise that, or shorten the scaffold")


def _scaffolds(schema: Schema, layout: ModuleSpan) -> tuple[Scaffold, ...]:
    order = {module.path: number for number, module in enumerate(layout.modules())}
    groups = [
        tuple(sorted((tuple(n.split("/")) for n in names), key=order.__getitem__)) for names in schema.tree.scaffolds
    ]
    return tuple(sorted(groups, key=len, reverse=True))


class _Pieces:
    """Builder of pieces, parents first."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self.by_key: dict[PieceKey, SchemaPiece] = {}
        self.own: dict[tuple[Path, Scaffold | None], tuple[PieceKey, ...]] = {}
        self.before: dict[Path, tuple[PieceKey, ...]] = {}
        """Parents of a module's first piece, without a scaffold."""
        self._union_members: dict[PieceKey, tuple[Path, ...]] = {}
        """Members of the union that a piece represents to later text; a scaffold may contain others of them."""
        self.scaffold: Scaffold | None = None
        """Scaffold whose variants are being made; None: plain pieces."""

    def add(self, module: ModuleSpan, parents: tuple[PieceKey, ...]) -> None:
        """Make the pieces of a module, the first of which attends to `parents`, and of all modules inside."""
        if self.scaffold is None:
            self.before[module.path] = parents
        own: list[PieceKey] = []
        for child in module.children:
            match child:
                case TextSpan() | SlotSpan():
                    own.append(self._make(module, child, len(own), parents))
                    parents = (*parents, own[-1])
                case ModuleSpan():
                    self.add(child, parents)
                case UnionSpan():
                    for member in child.members:
                        self.add(member, parents)
                    parents = (*parents, *self._scaffold_pieces(child))
        self.own[module.path, self.scaffold] = tuple(own)

    def _scaffold_pieces(self, union: UnionSpan, around: tuple[Path, ...] = ()) -> Iterator[PieceKey]:
        """Yield the pieces of a union that later text attends to: those of the member that its scaffold names."""
        members = (*around, *(member.path for member in union.members))
        for member in (member for member in union.members if member.path[-1] == union.scaffold):
            own = iter(self.own[member.path, self.scaffold])
            for child in member.children:
                if isinstance(child, TextSpan | SlotSpan):
                    key = next(own)
                    self._union_members[key] = members
                    yield key
                elif isinstance(child, UnionSpan):
                    yield from self._scaffold_pieces(child, members)

    def add_together(self, scaffold: Scaffold, modules: Mapping[Path, ModuleSpan]) -> None:
        """Make the pieces of a scaffold's members; the first member reuses its plain pieces."""
        first, *later = scaffold
        self.scaffold = scaffold
        for module in modules[first].modules():
            self.own[module.path, scaffold] = self.own[module.path, None]
        together = dict.fromkeys(self.own[first, None])
        for path in later:
            parents, before = list(together), [key for key in self.before[path] if key not in together]
            before = [key for key in before if not self._is_replaced(key, scaffold)]
            if before:  # members do not overlap: only text of modules around them lies between
                parents = sorted([*before, *parents], key=lambda key: self.by_key[key].start)
            self.add(modules[path], tuple(parents))
            together |= dict.fromkeys(self.own[path, scaffold])

    def _is_replaced(self, key: PieceKey, scaffold: Scaffold) -> bool:
        """Return whether a scaffold has its own pieces for the union that a piece represents."""
        members, module = self._union_members.get(key, ()), self.by_key[key].module
        peers = [path for path in members if module[: len(path)] != path]
        return bool(members) and (module in scaffold or any(path[: len(o)] == o for o in peers for path in scaffold))

    def _make(self, module: ModuleSpan, span: TextSpan | SlotSpan, nth: int, parents: tuple[PieceKey, ...]) -> PieceKey:
        together = "" if self.scaffold is None else f" [{' '.join('/'.join(path) for path in self.scaffold)}]"
        key = f"{'/'.join(module.path)}#{nth}{together}"
        slot = span if isinstance(span, SlotSpan) else None
        tokens = (*span.tokens, *(self.fill,) * (span.length - len(span.tokens)))
        confidential = module.confidential or any(self.by_key[parent].confidential for parent in parents)
        fields = (key, module.path, tokens, span.start, parents, slot, module.cached, confidential, self.scaffold)
        self.by_key[key] = SchemaPiece(*fields)
        return key
