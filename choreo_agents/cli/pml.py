"""`choreo pml`: checks, lays out and runs PML schemas, whose modules are encoded once, and prompts that import them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, command_console, waiting

if TYPE_CHECKING:
    from choreo_agents.errors import PMLProblem
    from choreo_agents.pml.compiler import Span

_SHOWN = 60
"""Most characters of a text that `layout` prints."""


@takes_loading
def check(
    schema: Annotated[Path, typer.Argument(help="A schema.")],
    prompts: Annotated[list[Path] | None, typer.Argument(help="Prompts of the schema.", metavar="[PROMPT]...")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Count tokens with this model: reports what is too long, too.")
    ] = None,
    loading: Loading = USUAL,
) -> None:
    """List all errors in a schema, or in prompts of it: file, line, column, and what was expected there.

    The exit code is 1 if there are any.

    [b]Examples[/b]

      choreo pml check travel.pml
      choreo pml check travel.pml question.pml --model embedded
    """
    problems: list[PMLProblem] = []
    with command_console() as console:
        from choreo_agents.errors import PMLError
        from choreo_agents.pml import Schema, compile_prompt, compile_schema

        loaded = None if model is None else load(console, model, loading)
        try:
            parsed = Schema.from_file(schema)
            compiled = None if loaded is None else compile_schema(parsed, loaded)
        except PMLError as error:
            problems, prompts = [*error.problems], []
        for file in prompts or []:
            try:
                prompt = parsed.prompt_file(file)
                if compiled is not None and loaded is not None:
                    compile_prompt(compiled, prompt, loaded)
            except PMLError as error:
                problems += error.problems
    for problem in problems:
        place = Text(f"{problem.file}:{problem.line}:{problem.column}: ", style="bold")
        expected = Text(f"; expected {problem.expected}" if problem.expected else "", style="green")
        console.print(Text.assemble(place, problem.message, expected), soft_wrap=True)
    if problems:
        console.print("[red bold]1 problem[/]" if len(problems) == 1 else f"[red bold]{len(problems)} problems[/]")
        raise typer.Exit(1)
    console.print("[green]no problems[/]")


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
    with command_console() as console:
        from choreo_agents.pml import Schema, compile_schema

        schema = Schema.from_file(file)
        compiled = compile_schema(schema, load(console, model, loading))
    tree = Tree(_line(compiled.layout, f"schema {schema.name}", "bold"))
    _grow(tree, compiled.layout.children)
    console.print(tree)
    cached = [piece for piece in compiled.cached_pieces() if piece.scaffold is None]
    together = sum(len(piece.tokens) for piece in compiled.pieces.values() if piece.scaffold is not None)
    summary = f"{sum(len(piece.tokens) for piece in cached)} tokens are encoded once, in {len(cached)} pieces"
    console.print(summary + (f"; {together} more for scaffolds" if together else ""))


@takes_loading
def run_prompt(
    schema: Annotated[Path, typer.Argument(help="A schema.")],
    prompt: Annotated[Path, typer.Argument(help="A prompt of the schema.")],
    model: ModelOption = "embedded",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="Folder for encoded modules, which the next run reads; by default they are not stored."
        ),
    ] = None,
    salt: Annotated[
        str,
        typer.Option(envvar="CHOREO_SALT", help="With --folder: the secret that signs its files.", metavar="TEXT"),
    ] = "",
    speaker: Annotated[
        str | None, typer.Option("--speaker", help="Agent that answers, if the model writes names.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature of the answer.")] = 0.0,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Answer a prompt over encoded modules, and count the tokens that are encoded and read from the cache.

    Modules of the schema that are not in --folder are encoded first. The answer reads them from the cache, and encodes
    only the rest of the prompt and its own tokens.

    [b]Examples[/b]

      choreo pml run examples/pml/travel.pml examples/pml/travel.prompt.pml
      CHOREO_SALT=... choreo pml run travel.pml question.pml --model path/or/hub-name --folder ~/modules
    """
    with command_console(as_json=as_json) as console:
        from choreo_agents.engine import Engine, Memory, StreamedToken
        from choreo_agents.pml import Schema, SchemaLibrary
        from choreo_agents.sampling import Sampling

        if folder is not None and not salt:
            raise ValueError(
                "files in --folder are signed with a secret, which other runs need: set CHOREO_SALT, or pass --salt"
            )
        parsed_schema = Schema.from_file(schema)
        parsed_prompt = parsed_schema.prompt_file(prompt)
        loaded = load(console, model, loading)
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=0)
        memory = Memory(persist_dir=folder)
        with Engine.load(loaded, memory=memory, salt=salt) as engine, SchemaLibrary(engine) as library:
            with waiting(console, f"encoding [b]{escape(parsed_schema.name)}[/b] ..."):
                library.register(parsed_schema, encode="eager")
            answer = ""
            for event in library.stream(parsed_prompt, sampling, author=speaker):
                if isinstance(event, StreamedToken):
                    text = event.text if answer else event.text.lstrip()
                    console.print(Text(text), end="", soft_wrap=True)
                    answer += text
                else:
                    usage = engine.usage(event)
            console.print()
            answer = answer.removesuffix(engine.chat.turn_end).strip()
            encoded = {"schema": engine.stats().tokens_encoded - usage.tokens_encoded, "answer": usage.tokens_encoded}
    if as_json:
        counts = {"tokens_encoded": encoded, "tokens_reused": usage.tokens_reused}
        typer.echo(json.dumps({"schema": parsed_schema.name, "answer": answer, **counts}, indent=2))
        return
    summary = f"{encoded['schema']:,} of the schema, {encoded['answer']:,} for this answer"
    console.print(f"[dim]tokens encoded: {summary}; read from the cache: {usage.tokens_reused:,}[/]", soft_wrap=True)


def _grow(tree: Tree, spans: tuple[Span, ...]) -> None:
    from choreo_agents.pml.compiler import ModuleSpan, SlotSpan, TextSpan, UnionSpan

    for span in spans:
        match span:
            case TextSpan():
                short = span.text if len(span.text) <= _SHOWN else f"{span.text[: _SHOWN - 1]}…"
                tree.add(_line(span, repr(short), "dim"))
            case SlotSpan():
                tree.add(_line(span, f"parameter {span.name}", "yellow"))
            case ModuleSpan():
                marks = ("" if span.cached else ", not cached") + (", confidential" if span.confidential else "")
                _grow(tree.add(_line(span, f"module {span.path[-1]}{marks}", "green")), span.children)
            case UnionSpan():
                _grow(tree.add(_line(span, "union", "cyan")), span.members)


def _line(span: Span, label: str, style: str) -> Text:
    """Return a span's first and last position, its length, and its label."""
    if not span.length:
        return Text.assemble(f"{span.start:>5} (empty)    ", (label, style))
    return Text.assemble(f"{span.start:>5}–{span.end - 1:<5} ", (f"{span.length:>5}  ", "dim"), (label, style))
