"""`choreo pml memory`: what a cached token takes in each memory."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, errors_as_lines
from choreo_agents.terminal.waiting import importing

_GIB = 1 << 30


@takes_loading
def memory(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A folder or hub name, besides the embedded model; repeatable.")
    ] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Show what a cached token takes in each memory: measured, for the embedded model and any others.

    [b]Example[/b]

      choreo pml memory --model path/or/hub-name
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_bench.experiments.pml_memory.measure import token_memory

    rows: dict[str, dict[str, Any]] = {}
    with errors_as_lines(console):
        for name in dict.fromkeys(["embedded", *(model or [])]):
            loaded = load(console, name, loading)
            taken, kept = token_memory(loaded), str(loaded.adapter.geometry.dtype).removeprefix("torch.")
            rows[name] = {"dtype": kept, "device": taken.device, "host": taken.host, "disk": taken.disk}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, title="KiB that a cached token takes", title_justify="left")
    table.add_column("model")
    for column in ("kept as", "device", "host", "disk", "tokens in 1 GiB"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        sizes = [f"{row[place] / 1024:,.2f}" for place in ("device", "host", "disk")]
        table.add_row(escape(name), row["dtype"], *sizes, f"{_GIB / row['device']:,.0f}")
    console.print(table)
    console.print("[dim]In 16 bits a Llama 7B takes 512 KiB (Prompt Cache, table 2).[/]")
