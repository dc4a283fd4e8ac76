"""`choreo bench directory`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.engine.elsewhere.directory import HandleDirectory
from choreo_agents.lab.experiments.bench_directory.measure import DirectoryBench, DirectoryHere, FarDirectory
from choreo_agents.lab.experiments.bench_directory.report import COLUMNS, DirectoryReport, as_markdown
from choreo_agents.lab.simulating.costs import processor
from choreo_agents.terminal.options import bar, errors_as_lines, numbers, require_writable
from choreo_agents.training.journal import Journal


def directory(
    ids: Annotated[int, typer.Option(min=1, help="That it knows.")] = DirectoryBench.ids,
    engines: Annotated[int, typer.Option(min=1, help="That have them.")] = DirectoryBench.engines,
    fronts: Annotated[int, typer.Option(min=1, help="That tell it.")] = DirectoryBench.fronts,
    per_request: Annotated[int, typer.Option("--per-request", min=1, help="Ids of each.")] = DirectoryBench.per_request,
    requests: Annotated[int, typer.Option(min=1, help="Of all clients, each time.")] = DirectoryBench.requests,
    clients: Annotated[str, typer.Option(help="How many at once, with commas between.")] = "1,4,16,64",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 9,
    seed: Annotated[int, typer.Option(help="Of what is asked.")] = 0,
    save_costs: Annotated[
        Path | None,
        typer.Option("--save-costs", metavar="FILE", help="Write what an id costs, for [b]choreo simulate[/b]."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every round to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
) -> None:
    """How many ids a directory is asked for and told in a second, and where it saturates.

    It is filled with ids in batches. Then more and more clients at once look ids up, and report as many that come as
    go; each asks again when it has its answer. The directory is in this process: what it takes is its own work.

    [b]Examples[/b]

      choreo bench directory --ids 10000 --requests 1000 --repeats 1
      choreo bench directory --out rounds.jsonl --report directory.md --save-costs directory.json
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_writable(report)
        bench = DirectoryBench(_in_process, ids, engines, fronts, per_request, requests, numbers(clients), seed)
        settings = {
            "directory": HandleDirectory.__name__,
            "processor": processor(),
            "ids": ids,
            "engines": engines,
            "fronts": fronts,
            "per_request": per_request,
            "requests": requests,
            "clients": bench.clients,
            "seed": seed,
        }
        with Journal(out, settings) as journal, bar(console) as progress:
            shown = progress.add_task("filling", total=repeats * bench.cells)
            bench.measure(journal, repeats, lambda what: progress.update(shown, advance=1, description=what))
        found = DirectoryReport(settings, journal.records, repeats)
        if save_costs is not None:
            found.costs().save(save_costs)
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, repeats)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place else "left")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
    for line in found.lines():
        console.print(line)


@asynccontextmanager
async def _in_process() -> AsyncIterator[FarDirectory]:
    yield DirectoryHere(HandleDirectory())


def _command(settings: dict[str, Any], repeats: int) -> str:
    """The command that measures the same again."""
    names = ("ids", "engines", "fronts", "per_request", "requests", "seed")
    words = [f"--{name.replace('_', '-')} {settings[name]}" for name in names]
    return " ".join(
        ["choreo bench directory", *words, f"--clients {','.join(map(str, settings['clients']))} --repeats {repeats}"]
    )
