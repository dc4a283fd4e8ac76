"""`choreo bench loading`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from choreo_agents.lab.experiments.bench_loading.measure import COLUMNS, WAYS, measure_loading
from choreo_agents.models.located import located
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.terminal.options import bar, errors_as_lines

_SETTLES_S = 3.0
"""Files that were written a moment ago are not remembered."""


def loading(
    model: Annotated[
        str,
        typer.Argument(help=f"A random Llama ({', '.join(SHAPES)}), a folder in Hugging Face's layout, or a hub name."),
    ] = "qwen3-0.6b",
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind; they take turns.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
) -> None:
    """How long a model takes to load, and how much memory beside its files, in fresh processes on the CPU.

    The plain load is `from_pretrained` and three forward passes of 32 tokens. Memory is what Linux calls RssAnon, above
    that after all imports: pages of the weights' files do not count.

    [b]Example[/b]

      choreo bench loading qwen3-0.6b --repeats 3
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console), tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            path = Path(folder) / model
            with console.status("drawing weights ..."):
                save_random_llama(SHAPES[model], path, dtype=torch.bfloat16)
                time.sleep(_SETTLES_S)
        else:
            path = Path(located(model))
        with bar(console) as progress:
            task = progress.add_task(model, total=len(WAYS) * (repeats + 1))
            found = measure_loading(
                path, model, repeats=repeats, threads=threads, on_progress=lambda: progress.update(task, advance=1)
            )
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{model}, {threads} thread(s), medians of {repeats}", title_justify="left"
    )
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
