"""`choreo inspect run`: writes the page of a recording's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.cli.recordings.loading import FileArgument
from choreo_agents.inspection import run_page
from choreo_agents.terminal.options import errors_as_lines


def run(
    path: FileArgument,
    html: Annotated[Path, typer.Option(help="Where the page is written; what is there is replaced.")],
    beside: Annotated[
        Path | None, typer.Option(help="Another recording, whose runs can be looked at beside these: a fork, say.")
    ] = None,
) -> None:
    """Write a page of HTML that shows a recording's runs: who spoke when, what each read, and what it saved.

    The page needs no network and no server: open it in a browser. It has the words that the recording has, and no
    others: those of confidential agents and thoughts are in it only if they were recorded.

    [b]Examples[/b]

      choreo inspect run run.jsonl --html run.html
      choreo inspect run run.jsonl --beside fork.jsonl --html both.html
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        page = run_page(path, beside)
        page.write(html)
    size = html.stat().st_size / 1000
    console.print(f"{escape(str(html))}: {page.runs} runs, {page.calls} calls, {size:,.0f} kB")
    if page.recording.cut is not None:
        console.print(f"[yellow]The recording is not whole: {escape(page.recording.cut)}.[/]")
