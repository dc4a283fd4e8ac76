"""`choreo replay`: plays a recording again, and says what differs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.cli.recordings.loading import (
    FileArgument,
    JsonOption,
    RecordedModelOption,
    RunOption,
    SaltOption,
    TargetArgument,
    ThreadsOption,
    recorded_app,
)
from choreo_agents.graph.replaying import ReplayReport
from choreo_agents.graph.replaying import replay as play
from choreo_agents.terminal.loading import USUAL, Loading, takes_loading
from choreo_agents.terminal.options import errors_as_lines
from choreo_agents.terminal.waiting import waiting


@takes_loading
def replay(
    target: TargetArgument,
    path: FileArgument,
    expect: Annotated[
        Literal["words", "bits"],
        typer.Option(
            "--expect",
            help="[b]words[/b]: every call is decoded again, and its words compared; [b]bits[/b]: tokens and steps are "
            "the recording's, and the logits before each token are compared.",
        ),
    ] = "words",
    run: RunOption = None,
    model: RecordedModelOption = None,
    threads: ThreadsOption = None,
    salt: SaltOption = "",
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Play a recording again, without running its functions and tools, and say what differs.

    The exit code is 0 if nothing does, 1 if something does, and 2 if the recording cannot be played here: for bits, if
    threads, kernels, torch or dtype are others.

    [b]Examples[/b]

      choreo replay my_package.my_graph:graph run.jsonl
      choreo replay my_package.my_graph:graph run.jsonl --expect bits
      choreo replay my_package.my_graph:graph run.jsonl --run tools
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console, code=2):
        with (
            recorded_app(console, target, path, model, threads, salt, loading) as app,
            waiting(console, f"playing [b]{escape(str(path))}[/b] ..."),
        ):
            report = play(app, path, expect, run=run or ())
        if as_json:
            typer.echo(json.dumps({"same": report.same, **asdict(report)}, indent=2))
        else:
            _print(console, report)
    raise typer.Exit(0 if report.same else 1)


def _print(console: Console, report: ReplayReport) -> None:
    different = [call for call in report.calls if call.difference is not None]
    if different:
        table = Table(box=box.SIMPLE_HEAD, title=f"calls whose {report.expect} differ", title_justify="left")
        for column in ("run", "agent", "superstep", "branch", "call", "first difference"):
            table.add_column(column, overflow="fold")
        for call in different:
            author, *where = call.place
            table.add_row(str(call.run + 1), escape(author), *map(str, where), escape(call.difference or ""))
        console.print(table)
    for line in report.differences:
        console.print(f"[red bold]differs:[/] {escape(line)}")
    ran = f", {len(report.ran)} run" if report.ran else ""
    same = len(report.calls) - len(different)
    console.print(
        f"{same} of {len(report.calls)} calls have the same {report.expect}; {report.given} results of functions given"
        f"{ran}; {report.steps} steps."
    )
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]")
