"""Recordings on the command line: `choreo replay`, `choreo fork`, `choreo inspect record`, `choreo inspect run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, errors_as_lines, named_values
from choreo_agents.terminal.waiting import importing, waiting

if TYPE_CHECKING:
    from choreo_agents.engine.recording import Recording, RecordingHeader, RunStarted
    from choreo_agents.graph import CompiledChoreoGraph
    from choreo_agents.graph.recording.packing import Packing
    from choreo_agents.graph.replaying import ForkReport, ReplayReport

TargetArgument = Annotated[
    str, typer.Argument(help="[b]module:graph[/b]: the graph, compiled or not, or what makes one.")
]
FileArgument = Annotated[Path, typer.Argument(help="What [b]engine.record(path)[/b] has written.")]
RecordedModelOption = Annotated[
    str | None, typer.Option("--model", help="Where the recording's model is; by default where it was.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="That torch computes with; by default as many as then.")
]
RunOption = Annotated[
    list[str] | None,
    typer.Option("--run", help="A function to run after all, by its node; [b]tools[/b]: all functions."),
]
SaltOption = Annotated[
    str, typer.Option(envvar="CHOREO_SALT", help="The tenant's secret, if the engine was recorded with one.")
]


_MASKED = "[dim]masked[/]"


def record(path: FileArgument, as_json: JsonOption = False) -> None:
    """Show a recording: its calls in order, who made them, how many tokens they said, and words unless masked.

    [b]Examples[/b]

      choreo inspect record run.jsonl
      choreo inspect record run.jsonl --json
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.engine.recording import read_recording

    with errors_as_lines(console):
        recording = read_recording(path)
        if as_json:
            for line in (recording.header, *recording.lines):
                typer.echo(line.model_dump_json())
        else:
            _print_recording(console, recording)
    if recording.cut is not None:
        console.print(f"[yellow]The recording is not whole: {escape(recording.cut)}.[/]")


def _print_recording(console: Console, recording: Recording) -> None:
    header = recording.header
    conditions = ", ".join(f"{name} {value}" for name, value in header.conditions.items() if name != "model")
    console.print(f"[b]{escape(header.model)}[/b] ({header.conditions['model']}): {escape(conditions)}")
    kept = ["words", *(["bits"] if header.bits else []), *(["confidential words"] if header.confidential else [])]
    steps = f", {len(recording.steps())} steps" if header.bits else ""
    console.print(f"{', '.join(kept)}{steps}; digests keyed by the {_key(header.keyed)}")
    for run in recording.runs:
        console.print(_run_table(recording, run))


def _run_table(recording: Recording, run: RunStarted) -> Table:
    from choreo_agents.engine.recording import RecordedCall, RecordedNode
    from choreo_agents.graph.recording.packing import Packing

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
    with importing(console):
        from choreo_agents.inspection import run_page

    with errors_as_lines(console):
        page = run_page(path, beside)
        page.write(html)
    size = html.stat().st_size / 1000
    console.print(f"{escape(str(html))}: {page.runs} runs, {page.calls} calls, {size:,.0f} kB")
    if page.recording.cut is not None:
        console.print(f"[yellow]The recording is not whole: {escape(page.recording.cut)}.[/]")


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
    with importing(console):
        from choreo_agents.graph.replaying import replay as play

    with errors_as_lines(console, code=2):
        with (
            recorded_app(console, target, path, model, threads, salt, loading) as app,
            waiting(console, f"playing [b]{escape(str(path))}[/b] ..."),
        ):
            report = play(app, path, expect, run=run or ())
        if as_json:
            typer.echo(json.dumps({"same": report.same, **asdict(report)}, indent=2))
        else:
            _print_replay(console, report)
    raise typer.Exit(0 if report.same else 1)


def _print_replay(console: Console, report: ReplayReport) -> None:
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
    with importing(console):
        from choreo_agents.graph.replaying import fork as go_on

    with errors_as_lines(console, code=2):
        spelled = named_values("--set", changes)
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
            _print_fork(console, report)


def _print_fork(console: Console, report: ForkReport) -> None:
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


@contextmanager
def recorded_app(
    console: Console, target: str, path: Path, model: str | None, threads: int | None, salt: str, loading: Loading
) -> Iterator[CompiledChoreoGraph]:
    """The compiled graph of a recording.

    Args:
        console: Says what is waited for.
        target: Names the graph; what is compiled already keeps its engine.
        path: The recording.
        model: Where its model is; None: where it was.
        threads: Of torch; None: as many as it was recorded with.
        salt: The tenant's.
        loading: How the model is loaded.
    """
    import torch

    from choreo_agents.cli.graphs import current_folder, named_graph
    from choreo_agents.engine import Engine
    from choreo_agents.engine.recording import read_recording
    from choreo_agents.graph import CompiledChoreoGraph

    with current_folder(), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        header, found = read_recording(path).header, named_graph(target)
        threads = threads or int(header.conditions["threads"])
        if isinstance(found, CompiledChoreoGraph):
            torch.set_num_threads(threads)
            yield found
            return
        loaded = load(console, model or header.model, loading)
        torch.set_num_threads(threads)
        engine = stack.enter_context(Engine.load(loaded, **_settings(header), salt=salt))
        for name, folder in header.adapters.items():
            if name not in engine.adapters:
                engine.load_adapter(folder, name)
        yield found.compile(engine=engine)


def _settings(header: RecordingHeader) -> dict[str, Any]:
    """Of the engine: as it was."""
    if header.adapter is not None and header.adapter not in header.adapters:
        raise ValueError(f"the recording does not say where its adapter {header.adapter!r} is")
    return {
        "method": header.conditions["method"],
        "seed": header.seed,
        "adapter": None if header.adapter is None else header.adapters[header.adapter],
    }
