"""`choreo compare`: runs the user's graph under several methods and prints the costs as a table, sentences or JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, bar, command_console, titled

if TYPE_CHECKING:
    from choreo_agents.graph.comparing import Comparison, Figure

_INPUT: TypeAdapter[str | dict[str, Any]] = TypeAdapter(str | dict[str, Any])
"""A state or a question."""
_FIGURES: tuple[Figure, ...] = ("tokens_encoded", "first_token_s", "end_to_end_s")


def table_of(comparison: Comparison, title: str) -> RenderableType:
    """Return a table of each method's counts and times and their ratios to choreo's, with a note that explains it."""
    table = titled(title, comparison.columns, comparison.rows(), comparison.columns[1:])
    note = (
        "choreo: from the cache. baseline: text with a prefix cache. naive: text without one. All are forced to the "
        f"same tokens; times are medians ({comparison.repeats} runs of each, in turn, on fresh engines), without "
        "functions and tools. First token: mean time from the start of a node, including encoding."
    )
    return Group(table, Text(note, style="dim"))


def summary(comparison: Comparison, name: str) -> Text:
    """Return three sentences that compare choreo with both baselines; `name` is the workflow, as in `debate`."""
    words = {"tokens_encoded": ("fewer", "more", "as many")}
    (encoded, spoke, ended), (_, _, ended_plain) = (
        [_times(comparison.ratio(twin, key), *words.get(key, ("sooner", "later", "as soon"))) for key in _FIGURES]
        for twin in ("baseline", "naive")
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens. Its agents' first tokens came {spoke}, "
        f"and the whole {name} ended {ended}. Against text without one it ended {ended_plain}."
    )


def as_object(comparison: Comparison) -> dict[str, Any]:
    """Return the cost of each method and its ratio to choreo's, as plain JSON."""
    return {
        "methods": {method: asdict(comparison.cost(method)) for method in comparison.ways},
        "ratios": {method: {key: comparison.ratio(method, key) for key in _FIGURES} for method in comparison.ways[1:]},
    }


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """Return a ratio in words, as in `1.50x fewer`."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"


@takes_loading
def compare(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: the graph, compiled or not, or its factory.")],
    path: Annotated[Path, typer.Argument(metavar="INPUTS", help="A JSONL file: a state or a question on each line.")],
    model: ModelOption = "embedded",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas; the first runs functions and tools.")] = (
        "choreo,baseline,naive"
    ),
    strategies: Annotated[
        str, typer.Option(help="Merging strategies to compare, such as [b]parallel,sequential[/b].")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; times are medians.")] = 3,
    seed: Annotated[int | None, typer.Option(help="Seed of the runs.")] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Run a graph from its cache and as text: tokens encoded, first token, end to end, and where answers differ.

    A line of INPUTS is a state, such as [b]{"messages": [["user", "What is new?"]]}[/b], or a question in quotes. The
    first method decodes freely and runs functions and tools; its tokens and their results are then forced on all
    methods, which are timed. At last the other methods decode freely, too, and answers are compared.

    The graph's module is imported, so its code runs. The current folder is searched for modules first.

    [b]Examples[/b]

      choreo compare my_package.my_graph:graph questions.jsonl --model path/or/hub-name
      choreo compare my_package.my_graph:app inputs.jsonl --methods choreo,baseline --json
      choreo compare my_package.merge:graph inputs.jsonl --strategies parallel,sequential
    """
    with command_console(as_json=as_json) as console, ExitStack() as stack:
        from choreo_agents.cli.graphs import current_folder, named_graph
        from choreo_agents.engine import Engine
        from choreo_agents.graph import CompiledChoreoGraph
        from choreo_agents.graph.comparing import compare as compared
        from choreo_agents.workflows.cases import read_json_lines

        stack.enter_context(current_folder())
        lines, app = read_json_lines(path, _INPUT, "a state or a quoted question"), named_graph(target)
        if not isinstance(app, CompiledChoreoGraph):
            app = app.compile(engine=stack.enter_context(Engine.load(load(console, model, loading))))
        with bar(console, "runs") as update:
            comparison = compared(
                app,
                [value for _, value in lines],
                methods=_names(methods),
                strategies=_names(strategies),
                repeats=repeats,
                seed=seed,
                progress=lambda completed, total: update(completed=completed, total=total),
            )
        if as_json:
            answers = [{"answers": item.answers, "differs": item.differs} for item in comparison.inputs]
            typer.echo(json.dumps({"repeats": repeats, **as_object(comparison), "inputs": answers}, indent=2))
        else:
            _show(console, comparison)


def _names(text: str) -> Any:
    return [name.strip() for name in text.split(",") if name.strip()]


def _show(console: Console, comparison: Comparison) -> None:
    console.print(table_of(comparison, f"the same words under each method, {len(comparison.inputs)} inputs in all"))
    for number, item in enumerate(comparison.inputs, start=1):
        if item.differs is not None:
            console.print(
                f"[yellow]input {number}: {escape(item.differs)} is the first to answer differently; final answers:[/]"
            )
            for method, answer in item.answers.items():
                console.print(f"  {method}: {escape(answer)}")
    same = sum(item.differs is None for item in comparison.inputs)
    console.print(f"{same} of {len(comparison.inputs)} inputs have identical answers, decoding freely.")
