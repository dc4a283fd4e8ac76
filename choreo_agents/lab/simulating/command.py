"""`choreo simulate`: what more engines would be worth to runs that were recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.showing.plots import require_plots
from choreo_agents.lab.simulating.costs import CostsFile, known_costs, read_costs
from choreo_agents.lab.simulating.installed import require_simpy
from choreo_agents.lab.simulating.measuring import USUAL_PROBE, measured_costs
from choreo_agents.lab.simulating.plot import save_simulation
from choreo_agents.lab.simulating.report import SimulationReport
from choreo_agents.lab.simulating.rules import RULES
from choreo_agents.lab.simulating.trace import RecordedTrace, read_trace
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable

MEASURE = "measure"
"""In the place of a file of costs: measured here and now."""


@takes_loading
def simulate(
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", metavar="FILE", help="What [b]engine.record(path)[/b] has written; may be repeated."),
    ] = None,
    engines: Annotated[
        str, typer.Option("--engines", help="How many, with commas between.")
    ] = "1,2,4,8,16,32,64,128,256",
    copies: Annotated[int, typer.Option(min=1, help="How often the runs of each trace are run, side by side.")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Threads that begin in a second, at random moments; by default all begin at once. A thread's runs "
            "follow each other; a run without one stands alone.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of these moments.")] = 0,
    costs: Annotated[
        list[str] | None,
        typer.Option(
            "--costs",
            metavar="FILE|measure",
            help="What work costs, as JSON; may be repeated, the last that says a cost counts. [b]measure[/b]: steps, "
            "prefills and a front's CPU are measured here, on the recorded model. The rest is guessed, and said so.",
        ),
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option("--save-costs", metavar="FILE", help="Keep what [b]--costs measure[/b] finds.")
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Use costs of another model than the recorded one: to ask what if.")
    ] = False,
    fronts: Annotated[int, typer.Option(min=1, help="That share the runs, the engines and one directory.")] = 1,
    rule: Annotated[
        str, typer.Option("--rule", help=f"By which calls are placed: {', '.join(RULES)}; the first is the product's.")
    ] = "route",
    model: Annotated[
        str | None, typer.Option("--model", help="Where the recorded model is, to measure; by default where it was.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Also write all figures to this file; -: to stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.png", help="Also draw throughput, first tokens and bytes.")
    ] = None,
    loading: Loading = USUAL,
) -> None:
    """What more engines would be worth: recorded runs, played on so many in simulated time.

    Calls wait for each other as they did when they were recorded, and functions take as long as they took. Where a
    call runs is decided by the product's own code; engines serve rows step by step, as its scheduler plans them.
    Nothing is computed, so that what work costs must be known: from micro-benchmarks, never from the runs themselves.

    [b]first token[/b] counts from when all that a call waits for was there. [b]encoded again[/b]: tokens that another
    engine had encoded. [b]front[/b] and, with several of them, [b]directory[/b]: the share of the time in which they
    are busy.

    [b]Examples[/b]

      choreo simulate --trace run.jsonl --costs measure --save-costs costs.json
      choreo simulate --trace run.jsonl --costs costs.json --copies 64 --engines 1,4,16,64 --plot engines.png
      choreo simulate --trace a.jsonl --trace b.jsonl --costs costs.json --costs network.json --rate 20
    """
    to_stdout = json_out is not None and str(json_out) == "-"
    console = Console(stderr=to_stdout, highlight=False)
    with errors_as_lines(console):
        require_simpy()
        from choreo_agents.lab.simulating.running import simulated  # noqa: PLC0415 - it needs SimPy

        counts = _counts(engines)
        if rule not in RULES:
            raise InvalidRequestError(f"--rule is one of {', '.join(RULES)}, not {rule!r}")
        if plot is not None:
            require_plots()
        for path in (save_costs, plot, None if to_stdout else json_out):
            require_writable(path)
        if not traces:
            raise InvalidRequestError("there is nothing to play: --trace FILE, as engine.record(path) writes one")
        recorded = [_trace(path) for path in traces]
        _require_one_model(recorded)
        files = [
            _measured(console, recorded[0], model, save_costs, loading) if each == MEASURE else read_costs(each)
            for each in costs or ()
        ]
        known = known_costs(files, recorded[0].header, any_model=any_model)
        options: dict[str, Any] = {"copies": copies, "rate": rate, "seed": seed, "fronts": fronts, "rule": rule}
        with _counting(console, recorded, counts, copies) as on_call:
            report = simulated(recorded, counts, known, **options, on_call=on_call)
        if plot is not None:
            save_simulation(report, plot)
        if json_out is not None and not to_stdout:
            json_out.write_text(json.dumps(report.as_object(), indent=2) + "\n")
    if to_stdout:
        typer.echo(json.dumps(report.as_object(), indent=2))
    else:
        _print(console, report)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise InvalidRequestError(f"--engines are numbers from 1 on, with commas between, as 1,2,4, not {text!r}")
    return sorted(set(counts))


def _trace(path: Path) -> RecordedTrace:
    try:
        return read_trace(path)
    except FileNotFoundError:
        raise InvalidRequestError(f"there is no recording {str(path)!r}: engine.record(path) writes one") from None


def _require_one_model(traces: Sequence[RecordedTrace]) -> None:
    first = traces[0].header
    for other in (trace.header for trace in traces):
        if other.conditions["model"] != first.conditions["model"]:
            raise InvalidRequestError(
                f"the traces are of two models, {first.model!r} and {other.model!r}, whose engines are others: "
                "simulate them one after the other"
            )


def _measured(
    console: Console, trace: RecordedTrace, model: str | None, save: Path | None, loading: Loading
) -> CostsFile:
    header, before = trace.header, torch.get_num_threads()
    loaded = load(console, model or header.model, loading)
    try:
        torch.set_num_threads(int(header.conditions["threads"]))
        with Engine.load(loaded) as engine, bar(console) as progress:
            task = progress.add_task("measuring", total=USUAL_PROBE.parts)
            measured = measured_costs(
                engine, on_probe=lambda what: progress.update(task, advance=1, description=f"measuring {what}")
            )
    finally:
        torch.set_num_threads(before)
    if save is not None:
        measured.save(save)
        console.print(f"[dim]costs written to {escape(str(save))}[/]")
    return measured


@contextmanager
def _counting(console: Console, traces: Sequence[RecordedTrace], counts: Sequence[int], copies: int) -> Iterator[Any]:
    calls = copies * sum(len(trace.calls) for trace in traces)
    with bar(console) as progress:
        task = progress.add_task("", total=calls * len(counts))

        def on_call(engines: int, done: int) -> None:
            of_before = calls * counts.index(engines)
            progress.update(task, completed=of_before + done, description=f"{engines} engines")

        yield on_call


def _print(console: Console, report: SimulationReport) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=escape(report.title()), title_justify="left")
    for column in report.columns():
        table.add_column(column, justify="right")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    for line in report.lines():
        console.print(line, soft_wrap=True)
    for note in (*report.known.notes, *report.notes):
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
