"""Commands for recorded runs: `choreo replay`, `choreo fork`, `choreo inspect record`, `choreo inspect run`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, command_console, named_values, titled, waiting

if TYPE_CHECKING:
    from choreo_agents.engine.recording.format import Recording, RunStarted
    from choreo_agents.graph.replaying import ReplayReport

TargetArgument = Annotated[str, typer.Argument(help="[b]module:graph[/b]: the graph, compiled or not, or its factory.")]
FileArgument = Annotated[Path, typer.Argument(help="A file that [b]engine.record(path)[/b] wrote.")]
RecordedModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder or hub name of the recorded model; by default the recorded one.")
]
SaltOption = Annotated[
    str, typer.Option(envvar="CHOREO_SALT", help="The tenant's salt, if the engine was recorded with one.")
]
_MASKED = "[dim]masked[/]"


def record(path: FileArgument) -> None:
    """Show a recording: its calls in order, their agents, token counts, and texts unless masked.

    [b]Example[/b]

      choreo inspect record run.jsonl
    """
    with command_console() as console:
        from choreo_agents.engine.recording.format import read_recording

        recording = read_recording(path)
        header = recording.header
        content = "text, including that of confidential agents" if header.confidential else "words"
        console.print(f"[b]{escape(header.model)}[/b] ({header.fingerprint}), method {header.method}")
        console.print(f"{content}; {len(recording.steps())} steps")
        for run in recording.runs:
            console.print(_run_table(recording, run))
        _warn_if_cut(console, recording)


def _warn_if_cut(console: Console, recording: Recording) -> None:
    if recording.cut is not None:
        console.print(f"[yellow]The recording is incomplete: {escape(recording.cut)}.[/]")


def _run_table(recording: Recording, run: RunStarted) -> Table:
    from choreo_agents.engine.recording.format import RecordedCall, RecordedNode
    from choreo_agents.graph.recording.packing import describe_packed

    ended = recording.ended(run.run)
    how = "cut" if ended is None else ended.outcome
    thread = "" if run.thread is None else f", thread {run.thread}"
    seed = "" if run.seed is None else f", seed {run.seed}"
    rows = [("[dim]input[/]", "", "", "", _MASKED if run.input is None else escape(describe_packed(run.input)))]
    for line in recording.lines:
        if isinstance(line, RecordedCall) and line.run == run.run:
            words = _MASKED if line.text is None else escape(line.text)
            who = f"[b]{escape(line.author)}[/b]" + (f" [dim]({line.branch + 1})[/]" if line.branch else "")
            rows.append((who, str(line.superstep), str(line.view_tokens), str(line.sampled), words))
        elif isinstance(line, RecordedNode) and line.run == run.run:
            rows.append((escape(line.node), "", "", "", "" if line.outcome == "result" else line.outcome))
    counts = ("superstep", "read", "tokens")
    return titled(f"run {run.run + 1}: {how}{thread}{seed}", ("who", *counts, "words"), rows, counts)


def run(
    path: FileArgument,
    html: Annotated[Path, typer.Option(help="File for the page; an existing one is replaced.")],
    beside: Annotated[
        Path | None, typer.Option(help="Another recording to show beside this one: of a fork, for example.")
    ] = None,
) -> None:
    """Write an HTML page that shows a recording's runs: when agents spoke, what each call read, and what that saved.

    The page needs no network and no server: open it in a browser. It has only texts that the recording has: those of
    confidential agents and thoughts are in it only if they were recorded.

    [b]Examples[/b]

      choreo inspect run run.jsonl --html run.html
      choreo inspect run run.jsonl --beside fork.jsonl --html both.html
    """
    with command_console() as console:
        from choreo_agents.inspection import run_page

        page = run_page(path, beside)
        page.write(html)
    console.print(f"{escape(str(html))}: {html.stat().st_size / 1000:,.0f} kB")
    _warn_if_cut(console, page.recording)


@takes_loading
def replay(
    target: TargetArgument,
    path: FileArgument,
    model: RecordedModelOption = None,
    salt: SaltOption = "",
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Run a graph again with the answers of a recording, and list the calls that differ from it, and why.

    A call with the recorded prompt returns the recorded answer; any other call is decoded. Functions and tools run. The
    exit code is 0 if nothing differs, 1 if something does, and 2 if the recording cannot be run again here.

    [b]Examples[/b]

      choreo replay my_package.my_graph:graph run.jsonl
      choreo replay my_package.my_graph:graph run.jsonl --json
    """
    report = fork(target, path, model=model, salt=salt, as_json=as_json, loading=loading)
    raise typer.Exit(0 if report.same else 1)


@takes_loading
def fork(
    target: TargetArgument,
    path: FileArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="[b]alice.system[/b], [b]alice.prompt[/b], [b]alice:2.words[/b] (its second answer), [b]run.seed[/b] "
            "or [b]input[/b] (the text of its last message).",
        ),
    ] = None,
    model: RecordedModelOption = None,
    salt: SaltOption = "",
    record: Annotated[
        Path | None,
        typer.Option(help="Record the fork, too: [b]choreo inspect run --beside[/b] shows both runs side by side."),
    ] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> Any:
    """Run a recorded graph again with a change: calls that it can reach are decoded, all others keep their answers.

    Functions and tools run. The exit code is 2 if the recording cannot be run again here.

    [b]Examples[/b]

      choreo fork my_package.my_graph:graph run.jsonl --set "alice.system=You are brief."
      choreo fork my_package.my_graph:graph run.jsonl --set "alice:2.words=No." --record fork.jsonl
      choreo fork my_package.my_graph:graph run.jsonl --set run.seed=7 --json
    """
    with command_console(as_json=as_json, error_code=2) as console, ExitStack() as stack:
        from choreo_agents.cli.graphs import current_folder, named_graph
        from choreo_agents.engine import Engine
        from choreo_agents.engine.recording.format import read_recording
        from choreo_agents.graph import CompiledChoreoGraph
        from choreo_agents.graph.replaying import fork as go_on
        from choreo_agents.graph.replaying import recorded_engine

        stack.enter_context(current_folder())
        values, header, graph = named_values("--set", changes), read_recording(path).header, named_graph(target)
        if not isinstance(graph, CompiledChoreoGraph):
            if header.adapter is not None and header.adapter not in header.adapters:
                raise ValueError(f"the recording does not contain the folder of its adapter {header.adapter!r}")
            adapter = None if header.adapter is None else header.adapters[header.adapter]
            settings: Any = {"method": header.method, "seed": header.seed, "salt": salt, "adapter": adapter}
            engine = stack.enter_context(Engine.load(load(console, model or header.model, loading), **settings))
            for name, folder in header.adapters.items():
                if name not in engine.adapters:
                    engine.load_adapter(folder, name)
            graph = graph.compile(engine=engine)
        stack.enter_context(waiting(console, f"running [b]{escape(str(path))}[/b] again ..."))
        if record is not None:
            stack.enter_context(recorded_engine(graph, header).record(record))
        report = go_on(graph, path, set=values)
    _show(console, report, as_json=as_json)
    return report


def _show(console: Console, report: ReplayReport, *, as_json: bool) -> None:
    from choreo_agents.graph.replaying import COLUMNS

    if as_json:
        shown = {"same": report.same, **asdict(replace(report, values={}))}
        del shown["values"]
        typer.echo(json.dumps(shown, indent=2))
        return
    other = [call for call in report.calls if not call.same]
    if other:
        rows = [[escape(str(cell)) for cell in call.row] for call in other]
        console.print(titled("calls that differ from the recording", COLUMNS, rows))
    for author, superstep, *_ in report.missing:
        console.print(f"[yellow]does not occur any more:[/] {escape(author)}, superstep {superstep}")
    for line in report.differences:
        console.print(f"[red bold]differs:[/] {escape(line)}")
    console.print(
        f"{len(report.calls) - len(other)} of {len(report.calls)} calls match the recording: {report.taken} tokens "
        f"forced, {report.sampled} sampled."
    )
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]")
