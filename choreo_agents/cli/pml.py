"""`choreo pml`: schemas whose modules are encoded once, and prompts that import them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from choreo_agents.pml import Schema, compile_schema
from choreo_agents.pml.checking import check_files
from choreo_agents.pml.layout import ModuleSpan, SlotSpan, Span, TextSpan, UnionSpan
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines

_SHOWN = 60
"""Characters of a text."""


@takes_loading
def check(
    files: Annotated[list[Path], typer.Argument(help="Schemas, and prompts of them.", metavar="FILE...")],
    model: Annotated[
        str | None, typer.Option("--model", help="Count tokens with this model: finds what is too long, too.")
    ] = None,
    loading: Loading = USUAL,
) -> None:
    """Say all that is wrong in schemas and prompts: file, line, column, and what was expected there.

    The exit code is 1 if anything is.

    [b]Examples[/b]

      choreo pml check travel.pml
      choreo pml check travel.pml question.pml --model embedded
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        loaded = None if model is None else load(console, model, loading)
        found = check_files(files, loaded)
    for each in found:
        place = Text(f"{each.file}:{each.line}:{each.column}: ", style="bold")
        expected = Text(f"; expected {each.expected}" if each.expected else "", style="green")
        console.print(Text.assemble(place, each.message, expected), soft_wrap=True)
    if found:
        problems = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        console.print(f"[red bold]{problems}[/] in {len({each.file for each in found})} of {len(files)} files")
        raise typer.Exit(1)
    console.print(f"[green]nothing wrong[/] in {len(files)} {'file' if len(files) == 1 else 'files'}")


@takes_loading
def layout(
    file: Annotated[Path, typer.Argument(help="A schema.")],
    model: ModelOption = "embedded",
    loading: Loading = USUAL,
) -> None:
    """Show the positions of a schema's texts, slots, modules and unions, as a model's tokenizer counts them.

    [b]Example[/b]

      choreo pml layout travel.pml --model embedded
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        schema = Schema.from_file(file)
        compiled = compile_schema(schema, load(console, model, loading))
    tree = Tree(_line(compiled.layout, f"schema {schema.name}", "bold"))
    _grow(tree, compiled.layout.children)
    console.print(tree)
    cached = [piece for piece in compiled.cached_pieces() if piece.scaffold is None]
    together = sum(len(piece.tokens) for piece in compiled.pieces.values() if piece.scaffold is not None)
    summary = f"{sum(len(piece.tokens) for piece in cached)} tokens are encoded once, in {len(cached)} pieces"
    console.print(summary + (f"; {together} more for scaffolds" if together else ""))


def _grow(tree: Tree, spans: tuple[Span, ...]) -> None:
    for span in spans:
        match span:
            case TextSpan():
                tree.add(_line(span, _quoted(span.text), "dim"))
            case SlotSpan():
                tree.add(_line(span, f"parameter {span.name}", "yellow"))
            case ModuleSpan():
                marks = ("" if span.cached else ", not cached") + (", confidential" if span.confidential else "")
                _grow(tree.add(_line(span, f"module {span.path[-1]}{marks}", "green")), span.children)
            case UnionSpan():
                _grow(tree.add(_line(span, "union", "cyan")), span.members)


def _line(span: Span, what: str, style: str) -> Text:
    """Positions, the last one included, and what stands there."""
    if not span.length:
        return Text.assemble(f"{span.start:>5} (empty)    ", (what, style))
    return Text.assemble(f"{span.start:>5}–{span.end - 1:<5} ", (f"{span.length:>5}  ", "dim"), (what, style))


def _quoted(text: str) -> str:
    short = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    return repr(short)
