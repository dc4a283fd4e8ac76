"""`choreo eval dilemma`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable
from choreo_bench.experiments.eval_dilemma.measure import (
    ALICES,
    VARIANTS,
    measure_dilemma,
)
from choreo_bench.experiments.eval_dilemma.plot import save_shifts
from choreo_bench.experiments.eval_dilemma.report import as_markdown, as_table, unread_words
from choreo_bench.showing.plots import require_plots


@takes_loading
def eval_dilemma(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Games for each of Alice's strategies.")] = 500,
    seed: Annotated[int, typer.Option(max=2**62, help="Of the first game; the others follow.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of all that is said.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the shifts to this PNG file.")] = None,
    loading: Loading = USUAL,
) -> None:
    """How often Bob cooperates, by what he sees of Alice, on the same games (table 3 and figure 8 of the paper).

    Differences to the baseline come with the 95 % interval that inverts McNemar's test.

    [b]Examples[/b]

      choreo eval dilemma --n 100
      choreo eval dilemma --out dilemma.md --plot dilemma.png
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if plot is not None:
            require_plots()
        require_writable(out)
        require_writable(plot)
        loaded = load(console, model, loading)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bars: dict[str, TaskID] = {
                variant: progress.add_task(variant, total=n * len(ALICES)) for variant in VARIANTS
            }
            report = measure_dilemma(
                loaded,
                games=n,
                seed=seed,
                temperature=temperature,
                on_progress=lambda each: progress.advance(bars[each]),
            )
        if as_json:
            typer.echo(json.dumps(report.as_object()))
        else:
            console.print(as_table(report))
            console.print(unread_words(report), style="dim")
        if out is not None:
            out.write_text(
                as_markdown(report, f"choreo eval dilemma --n {n} --seed {seed} --temperature {temperature:g}")
            )
        if plot is not None:
            save_shifts(report, plot)
