"""`choreo eval untuned`: the paper's tables of quality, on the embedded language."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import Sampling
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable
from choreo_agents.workflows.many import PlayProgress
from choreo_bench.experiments.eval_untuned.measure import TRIALS, measure_untuned
from choreo_bench.experiments.eval_untuned.report import TABLES, as_markdown, untuned_table
from choreo_bench.language import Split


@takes_loading
def untuned(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Items of each workflow.")] = 500,
    seed: Annotated[int, typer.Option(max=2**62, help="Of the first item; the others follow.")] = 0,
    split: Annotated[Split, typer.Option(help="Which items; the embedded model was trained on [b]train[/b].")] = "test",
    temperature: Annotated[float, typer.Option(min=0.0, help="Of all that is said.")] = 0.7,
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for the results; started again, it goes on there.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """All workflows on the embedded language, untuned: tables 1, 2 and 4 of Prompt Choreography.

    naive is left out: it encodes what the baseline encodes, only more often. Differences to the baseline come with the
    interval that inverts McNemar's test, those of shares with a paired bootstrap.

    [b]Examples[/b]

      choreo eval untuned --n 50
      choreo eval untuned --out runs/untuned --report untuned.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        loaded = load(console, model, loading)
        if not loaded.speaks_embedded:
            raise InvalidRequestError(f"{model!r} does not speak the embedded language: use choreo eval WORKFLOW")
        require_writable(report)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            bars: dict[tuple[str, str], TaskID] = {
                (trial.name, variant): progress.add_task(f"{trial.name}, {variant}", total=n, rate="")
                for trial in TRIALS
                for variant in trial.variants
            }

            def advance(name: str, so_far: PlayProgress) -> None:
                rate = f"{so_far.tokens / so_far.seconds:,.0f} tokens/s" if so_far.seconds else ""
                progress.update(bars[name, so_far.variant], completed=so_far.finished, rate=rate)

            found = measure_untuned(
                loaded,
                count=n,
                folder=out,
                split=split,
                seed=seed,
                sampling=Sampling(temperature=temperature, top_p=0.95, max_tokens=96),
                on_progress=advance,
            )
        if as_json:
            typer.echo(json.dumps({table: [asdict(line) for line in found.lines(table)] for table in TABLES}, indent=2))
        else:
            for table in TABLES:
                console.print(untuned_table(found, table))
        if report is not None:
            named = f" --model {shlex.quote(model)}" if model != "embedded" else ""
            command = f"choreo eval untuned{named} --n {n} --seed {seed} --split {split} --temperature {temperature:g}"
            report.write_text(as_markdown(found, command, loaded.adapter.fingerprint))
            console.print(f"[dim]written to {escape(str(report))}[/]")
