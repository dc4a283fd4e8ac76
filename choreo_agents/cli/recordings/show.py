"""`choreo inspect record`: shows what a recording holds."""

from __future__ import annotations

from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.cli.recordings.loading import FileArgument, JsonOption
from choreo_agents.engine.recording import RecordedCall, RecordedNode, Recording, RunStarted, read_recording
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.terminal.options import errors_as_lines

_MASKED = "[dim]masked[/]"


def record(path: FileArgument, as_json: JsonOption = False) -> None:
    """Show a recording: its calls in order, who made them, how many tokens they said, and words unless masked.

    [b]Examples[/b]

      choreo inspect record run.jsonl
      choreo inspect record run.jsonl --json
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        recording = read_recording(path)
        if as_json:
            for line in (recording.header, *recording.lines):
                typer.echo(line.model_dump_json())
        else:
            _print(console, recording)
    if recording.cut is not None:
        console.print(f"[yellow]The recording is not whole: {escape(recording.cut)}.[/]")


def _print(console: Console, recording: Recording) -> None:
    header = recording.header
    conditions = ", ".join(f"{name} {value}" for name, value in header.conditions.items() if name != "model")
    console.print(f"[b]{escape(header.model)}[/b] ({header.conditions['model']}): {escape(conditions)}")
    kept = ["words", *(["bits"] if header.bits else []), *(["confidential words"] if header.confidential else [])]
    steps = f", {len(recording.steps())} steps" if header.bits else ""
    console.print(f"{', '.join(kept)}{steps}; digests keyed by the {_key(header.keyed)}")
    for run in recording.runs:
        console.print(_run_table(recording, run))


def _run_table(recording: Recording, run: RunStarted) -> Table:
    ended = recording.ended(run.run)
    how = "cut" if ended is None else ended.outcome
    thread = "" if run.thread is None else f", thread {escape(run.thread)}"
    seed = "" if run.seed is None else f", seed {run.seed}"
    table = Table(box=box.SIMPLE_HEAD, title=f"run {run.run + 1}: {how}{thread}{seed}", title_justify="left")
    for column in ("who", "superstep", "read", "tokens", "words"):
        table.add_column(column, justify="right" if column in ("superstep", "read", "tokens") else "left")
    packing = Packing(None)
    table.add_row("[dim]input[/]", "", "", "", _told(packing, run.given, masked=run.given is None))
    for line in recording.lines:
        if isinstance(line, RecordedCall) and line.run == run.run:
            words = _MASKED if line.words is None else escape(line.words)
            branch = f" [dim]({line.branch + 1})[/]" if line.branch else ""
            row = str(line.superstep), str(line.read), str(line.count), words
            table.add_row(f"[b]{escape(line.author)}[/b]{branch}", *row)
        elif isinstance(line, RecordedNode) and line.run == run.run:
            what = "" if line.outcome == "result" else f"{line.outcome} "
            table.add_row(escape(line.node), "", "", "", what + _told(packing, line.result, masked=line.masked))
    return table


def _told(packing: Packing, packed: str | None, *, masked: bool) -> str:
    """What a function returned, or what a run was given."""
    if packed is None:
        return _MASKED if masked else "[dim]not written[/]"
    return escape(_short(packing.unpacked(packed)))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_short(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    text = getattr(value, "text", None)
    return str(text) if isinstance(text, str) else repr(value)


def _key(keyed: str) -> str:
    return "tenant's salt" if keyed == "salt" else "file beside it"
