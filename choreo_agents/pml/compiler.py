"""Turns a schema into the pieces that a model encodes, each once and by a prefill of its own.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from choreo_agents.models import LoadedModel
from choreo_agents.pml.layout import ModuleSpan, SlotSpan, TextSpan, UnionSpan, lay_out
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.syntax import Path, SourcePlace
from choreo_agents.pml.schema import Schema

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
