"""`choreo fork`: goes on from a recording otherwise."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.replaying import ForkReport
from choreo_agents.graph.replaying import fork as go_on
from choreo_agents.terminal.loading import USUAL, Loading, takes_loading
from choreo_agents.terminal.options import errors_as_lines
from choreo_agents.terminal.waiting import waiting


@takes_loading
def fork(
    target: TargetArgument,
    path: FileArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="[b]alice.system[/b], [b]alice.prompt[/b], [b]alice:2.words[/b] (what it says the second time), "
            "[b]run.seed[/b] or [b]input[/b] (the words of its last message).",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="AGENT:NUMBER", help="Before this call everything stays as it was said."),
    ] = None,
    run: RunOption = None,
    model: RecordedModelOption = None,
    threads: ThreadsOption = None,
    salt: SaltOption = "",
    record: Annotated[
        Path | None,
        typer.Option(help="Record the fork, too: [b]choreo inspect run --beside[/b] shows both runs side by side."),
    ] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Go on from a recording otherwise: only what the change can reach is computed again.

    Calls whose request is as recorded say what they said, and functions whose input is as recorded return what they
    returned; any other function is run only if [b]--run[/b] allows it. The exit code is 2 if it would have to be.

    [b]Examples[/b]

      choreo fork my_package.my_graph:graph run.jsonl --set "alice.system=You are brief."
      choreo fork my_package.my_graph:graph run.jsonl --at judge:1 --set "alice:2.words=No." --run tools
      choreo fork my_package.my_graph:graph run.jsonl --set run.seed=7 --json
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console, code=2):
        spelled = dict(_pair(text) for text in changes or [])
        with (
            recorded_app(console, target, path, model, threads, salt, loading) as app,
            waiting(console, f"forking [b]{escape(str(path))}[/b] ..."),
        ):
            report = go_on(app, path, at=at, set=spelled, run=run or (), record=record)
        if as_json:
            shown: dict[str, Any] = asdict(report)
            del shown["values"]
            typer.echo(json.dumps(shown, indent=2))
        else:
            _print(console, report)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequestError(f"spell what is set as NAME=VALUE, not {text!r}")
    return name, value


def _print(console: Console, report: ForkReport) -> None:
    if report.changed:
        table = Table(box=box.SIMPLE_HEAD, title="messages that are not as recorded", title_justify="left")
        for column in ("run", "agent", "superstep", "recorded", "now"):
            table.add_column(column, overflow="fold")
        for call in report.changed:
            then = "[dim]masked[/]" if call.recorded is None and call.outcome != "new" else escape(call.recorded or "")
            now = "[dim]confidential[/]" if call.words is None else escape(call.words)
            table.add_row(str(call.run + 1), escape(call.place[0]), str(call.place[1]), then, now)
        console.print(table)
    for author, superstep, *_ in report.gone:
        console.print(f"[yellow]not said any more:[/] {escape(author)}, superstep {superstep}")
    if report.route is not None:
        route = report.route
        now, then = (escape(", ".join(names)) or "the end" for names in (route.now, route.recorded))
        after = escape(", ".join(route.after)) or "the start"
        console.print(f"[yellow]another way:[/] after {after} came {then}, and now comes {now}")
        for names in route.follows:
            console.print(f"  then {escape(', '.join(names))}")
    computed = sum(call.outcome in ("same", "changed", "new") for call in report.calls)
    ran = f", {len(report.ran)} run" if report.ran else ""
    console.print(
        f"{len(report.changed)} of {len(report.calls)} messages changed; {computed} computed again: {report.sampled} "
        f"tokens sampled, {report.taken} taken as recorded; {report.given} results of functions given{ran}."
    )
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]")
