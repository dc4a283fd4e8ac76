"""`choreo bench sampling`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.lab.experiments.bench_sampling.measure import CASES, measure_sampling
from choreo_agents.lab.experiments.bench_sampling.report import BARS_AT, COLUMNS
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable

_QUICK_ROWS, _QUICK_WORDS = 4, 2_000
_LEFT_OUT = len(COLUMNS) - 1
"""A terminal has no room for how many tokens of each case were allowed."""


def sampling(
    rows: Annotated[int, typer.Option(min=1, help="Of a step.")] = BARS_AT[0],
    words: Annotated[int, typer.Option(min=1, help="Of the vocabulary; 262144 is Gemma's.")] = BARS_AT[1],
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of all cases.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = BARS_AT[2],
    quick: Annotated[
        bool, typer.Option("--quick", help=f"One round of {_QUICK_ROWS} rows of {_QUICK_WORDS:,} words: to see it run.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
) -> None:
    """What choosing the tokens of a step costs, in softmaxes over its logits, beside transformers' processors.

    Right before every choice a softmax over the same logits is timed, and the ratio is taken. [b]Peaked[/b] logits fall
    with a word's rank as a model's do, [b]flat[/b] ones are normal. Tokens are held against transformers' filters.

    [b]Examples[/b]

      choreo bench sampling --quick
      choreo bench sampling --report sampling.md
      choreo bench sampling --words 262144
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_writable(report)
        torch.set_num_threads(threads)
        if quick:
            rows, words, repeats = _QUICK_ROWS, _QUICK_WORDS, 1
        with bar(console) as progress:
            task = progress.add_task("", total=len(CASES) * (repeats + 1))
            found = measure_sampling(
                rows,
                words,
                repeats=repeats,
                on_progress=lambda name: progress.update(task, advance=1, description=name),
            )
        if report is not None:
            command = f"choreo bench sampling --rows {rows} --words {words} --repeats {repeats} --threads {threads}"
            report.write_text(found.as_markdown(command))
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
            return
        table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
        for place, column in enumerate(COLUMNS[:_LEFT_OUT]):
            table.add_column(column, justify="left" if place < 2 else "right")
        for row in found.table():
            table.add_row(*row[:_LEFT_OUT])
        console.print(table)
        for line in found.lines():
            console.print(line)
