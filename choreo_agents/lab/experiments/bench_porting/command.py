"""`choreo bench porting`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.lab.experiments.bench_porting.measure import WAYS, PortingBench, measure_porting
from choreo_agents.lab.experiments.bench_porting.report import COLUMNS, as_markdown, as_object, rows, title
from choreo_agents.lab.experiments.bench_porting.words import ROUTE, TeamLengths
from choreo_agents.lab.rivals import Absent, ForcedChatHuggingFace
from choreo_agents.lab.timing.model import timed_model
from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import USUAL, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable

_TURN = 16
"""Tokens around a turn at most."""


@takes_loading
def porting(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", min=1, help="Runs in each way.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Questions of the user, in one thread.")] = 3,
    system: Annotated[int, typer.Option(min=1, help="Tokens of each system prompt.")] = 64,
    task: Annotated[int, typer.Option(min=1, help="Tokens of each question.")] = 128,
    utterance: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """A supervisor, two workers and a writer: as a stock program, with one changed line, and with our nodes.

    The stock program has a ChatHuggingFace; one changed line makes that a ChatChoreo. Every call is forced to given
    tokens, and every decode step is paid for: ways differ in what they encode. Runs take turns, each on a fresh engine.

    [b]Examples[/b]

      choreo bench porting --model embedded
      choreo bench porting --report porting.md
    """
    console = Console(stderr=as_json, highlight=False)
    lengths = TeamLengths(turns, system, task, utterance)
    with errors_as_lines(console):
        require_writable(report)
        torch.set_num_threads(threads)
        longest = (1 + len(ROUTE)) * (system + _TURN) + turns * (task + len(ROUTE) * (utterance + 2 * _TURN) + _TURN)
        with timed_model(console, model, loading, longest, "fewer --turns or a shorter --task") as (loaded, path):
            served = loaded.adapter
            rival = None
            try:
                rival = ForcedChatHuggingFace(path, served.geometry.dtype, str(served.device))
            except Absent as reason:
                console.print(f"[yellow]not measured: {WAYS[0]}: {reason}[/]")
            bench = PortingBench(loaded, rival)
            with bar(console) as progress:
                progress_task = progress.add_task("", total=(n + 1) * len(bench.ways))
                found = measure_porting(
                    bench,
                    runs=n,
                    lengths=lengths,
                    on_progress=lambda way: progress.update(progress_task, advance=1, description=way),
                )
            settings: dict[str, Any] = {
                "model": model,
                "dtype": dtype_name(served.geometry.dtype),
                "device": device_name(served.device),
                "threads": threads,
                "runs": n,
                "calls": found[0].calls,
                **asdict(lengths),
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "langgraph": version("langgraph"),
            }
        if report is not None:
            words = [f"choreo bench porting --model {shlex.quote(model)}", *loading.words(), f"--n {n}"]
            words += [f"--{name} {number}" for name, number in asdict(lengths).items()]
            report.write_text(as_markdown(found, settings, " ".join([*words, f"--threads {threads}"])))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(as_object(found, settings), indent=2))
        return
    shown = Table(box=box.SIMPLE_HEAD, title=title(settings), title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="right" if column else "left")
    for row in rows(found):
        shown.add_row(*row)
    console.print(shown)
