"""`choreo compare`: a graph of the user's under several methods; a comparison's figures as a table, words and JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, bar, errors_as_lines, importing, titled

if TYPE_CHECKING:
    from choreo_agents.graph.comparing import Comparison, Figure

_TOLD: tuple[Figure, ...] = ("tokens_encoded", "first_token_s", "end_to_end_s")


def table_of(found: Comparison, title: str) -> RenderableType:
    """Return counts and times of each method, how many times as much as choreo the others took, and what that means."""
    table = titled(title, found.columns, found.columns[1:])
    for column in table.columns:
        column.style = "bold" if column.header == "baseline/choreo" else ""
    for row in found.rows():
        table.add_row(*row)
    note = (
        "choreo: from the cache. baseline: text with a prefix cache. naive: text without one. All are forced to the "
        f"same tokens; times are medians ({found.repeats} of each, in turn, on fresh engines), without functions and "
        "tools. First token: mean, from a node's start, encoding of what it reads included."
    )
    return Group(table, Text(note, style="dim"))


def summary(found: Comparison, what: str) -> Text:
    """Return three sentences on what was seen of a `debate`, whichever way it went."""
    words = {"tokens_encoded": ("fewer", "more", "as many")}
    (encoded, spoke, ended), (_, _, ended_plain) = (
        [_times(found.ratio(twin, figure), *words.get(figure, ("sooner", "later", "as soon"))) for figure in _TOLD]
        for twin in ("baseline", "naive")
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens. Its agents' first words came {spoke}, and "
        f"the whole {what} was over {ended}. Against text without one it was over {ended_plain}."
    )


def as_object(found: Comparison) -> dict[str, Any]:
    """Return costs by method, and the others' over choreo's, as JSON."""
    return {
        "methods": {way: asdict(found.cost(way)) for way in found.ways},
        "ratios": {way: {figure: found.ratio(way, figure) for figure in _TOLD} for way in found.ways[1:]},
    }


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """How many times as much something else took, as a person says it."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"


@takes_loading
def compare(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: the graph, compiled or not, or what makes one.")],
    path: Annotated[Path, typer.Argument(metavar="INPUTS", help="A JSONL file: a state or a question on each line.")],
    model: ModelOption = "embedded",
    methods: Annotated[str, typer.Option(help="With commas between; the first runs functions and tools.")] = (
        "choreo,baseline,naive"
    ),
    strategies: Annotated[
        str, typer.Option(help="By which synthesizers merge instead: [b]parallel,sequential[/b], say.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; times are medians.")] = 3,
    seed: Annotated[int | None, typer.Option(help="Of the runs.")] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Run a graph from its cache and as text: tokens encoded, first token, end to end, and where answers differ.

    An input is a line: a state, such as [b]{"messages": [["user", "What is new?"]]}[/b], or the words of a question in
    quotes. The first method says what it says, and runs functions and tools; the same words are forced on all methods,
    which are given what functions returned. Then the others decode freely, too, and answers are compared.

    The graph is had by importing its module, whose code runs. Modules are looked for in the current folder first.

    [b]Examples[/b]

      choreo compare my_package.my_graph:graph questions.jsonl --model path/or/hub-name
      choreo compare my_package.my_graph:app inputs.jsonl --methods choreo,baseline --json
      choreo compare my_package.merge:graph inputs.jsonl --strategies parallel,sequential
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.cli.graphs import current_folder, named_graph
        from choreo_agents.engine import Engine
        from choreo_agents.graph import CompiledChoreoGraph
        from choreo_agents.graph.comparing import compare as compared

    with errors_as_lines(console), current_folder(), ExitStack() as stack:
        inputs, app = _read(path), named_graph(target)
        if not isinstance(app, CompiledChoreoGraph):
            app = app.compile(engine=stack.enter_context(Engine.load(load(console, model, loading))))
        with bar(console, "runs") as update:
            found = compared(
                app,
                inputs,
                methods=_names(methods),
                strategies=_names(strategies),
                repeats=repeats,
                seed=seed,
                progress=lambda done, of: update(completed=done, total=of),
            )
        if as_json:
            answers = [{"answers": each.answers, "differs": each.differs} for each in found.inputs]
            typer.echo(json.dumps({"repeats": repeats, **as_object(found), "inputs": answers}, indent=2))
        else:
            _show(console, found)


def _names(text: str) -> Any:
    return [name.strip() for name in text.split(",") if name.strip()]


def _read(path: Path) -> list[Any]:
    """The inputs of a file.

    Raises:
        ValueError: A line is no state and no question; says which.
    """
    found = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} of {str(path)!r} is no JSON: {error}") from None
            if not isinstance(found[-1], str | dict):
                raise ValueError(f"line {number} of {str(path)!r} is no state and no question in quotes")
    if not found:
        raise ValueError(f"{str(path)!r} holds no inputs")
    return found


def _show(console: Console, found: Comparison) -> None:
    console.print(table_of(found, f"the same words under each method, {len(found.inputs)} inputs in all"))
    for number, each in enumerate(found.inputs, start=1):
        if each.differs is not None:
            console.print(
                f"[yellow]input {number}: {escape(each.differs)} is the first to say something else; final answers:[/]"
            )
            for way, answer in each.answers.items():
                console.print(f"  {way}: {escape(answer)}")
    same = sum(each.differs is None for each in found.inputs)
    console.print(f"{same} of {len(found.inputs)} inputs were answered word for word alike, decoding freely.")
