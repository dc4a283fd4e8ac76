"""`choreo bench guides`."""

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

from choreo_agents.engine import Engine
from choreo_agents.lab.experiments.bench_guides.measure import measure_guides
from choreo_agents.lab.experiments.bench_guides.report import COLUMNS, as_markdown, as_object, lines, table, title
from choreo_agents.lab.experiments.bench_guides.schemas import random_schemas
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable
from choreo_agents.tracing import StepRan

_QUICK, _QUICK_WORDS = 8, 2_000


def guides(
    schemas: Annotated[int, typer.Option(min=1, help="Random JSON schemas, an answer each.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the schemas.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Answers side by side.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    words: Annotated[int, typer.Option(min=512, help="Of a larger vocabulary; 151936 is Qwen's.")] = 151_936,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help=f"{_QUICK} schemas: to see it run.")] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
) -> None:
    """How many answers that random JSON schemas lead validate, and what masks cost beside a step.

    The embedded model answers, at temperature 1. A mask's cost is for a token and row, where those of a step are filled
    together: over the model's own vocabulary, and over one that is as large as those of real models.

    [b]Examples[/b]

      choreo bench guides --quick
      choreo bench guides --report guides.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_writable(report)
        torch.set_num_threads(threads)
        if quick:
            schemas, words = _QUICK, _QUICK_WORDS
        steps: list[StepRan] = []
        sink = lambda event: steps.append(event) if isinstance(event, StepRan) else None  # noqa: E731
        with Engine.load("embedded", sink=sink) as engine, bar(console) as progress:
            task = progress.add_task("", total=-(-schemas // rows) + 2)
            found = measure_guides(
                engine,
                steps,
                random_schemas(schemas, seed),
                rows=rows,
                max_tokens=max_tokens,
                words=words,
                on_progress=lambda what: progress.update(task, advance=1, description=what),
            )
        if report is not None:
            command = f"choreo bench guides --schemas {schemas} --seed {seed} --rows {rows} --max-tokens {max_tokens}"
            report.write_text(as_markdown(found, f"{command} --words {words} --threads {threads}"))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(as_object(found), indent=2))
        return
    shown = Table(box=box.SIMPLE_HEAD, title=title(found), title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in table(found):
        shown.add_row(*row)
    console.print(shown)
    for line in lines(found):
        console.print(line)
