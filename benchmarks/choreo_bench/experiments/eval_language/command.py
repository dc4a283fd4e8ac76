"""`choreo eval language`: how often answers are right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable
from choreo_bench.experiments.eval_language.measure import (
    SAMPLED,
    SAMPLES,
    LanguageReport,
    View,
    joined,
    measure,
    require_tasks,
    require_views,
)
from choreo_bench.experiments.eval_language.report import as_markdown, as_tables
from choreo_bench.language import Split


@takes_loading
def language(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems of each task.")] = 500,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be repeated.")] = None,
    views: Annotated[
        str,
        typer.Option(
            "--views",
            help="Any of these, with commas between. [b]ordinary[/b]: one prompt of text. [b]serial[/b]: messages from "
            "the cache, one after the other, each as it was encoded apart. [b]parallel[/b]: those that have not seen "
            "each other at one offset.",
        ),
    ] = "ordinary",
    split: Annotated[Split, typer.Option(help="Which problems; the model was trained on [b]train[/b].")] = "test",
    seed: Annotated[int, typer.Option(max=2**62, help="Of the first problem; the others follow.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the tables to this Markdown file.")] = None,
    loading: Loading = USUAL,
) -> None:
    """How well a model speaks the embedded language: accuracy by task, with 95 % intervals.

    Temperature 0, but for arithmetic, where one sample at temperature 0.7 is compared with the vote over eight.

    [b]Examples[/b]

      choreo eval language --n 100
      choreo eval language --task two_questions --views ordinary,serial,parallel
      choreo eval language --json > language.json
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        chosen = require_views(views.split(","))
        tasks = require_tasks(task or [])
        loaded = load(console, model, loading)
        require_writable(out)
        reports: list[LanguageReport] = []
        try:
            with _bars(console, chosen, tasks, n) as advance:
                for view in chosen:
                    reports.append(
                        measure(loaded, tasks=tasks, views=[view], count=n, split=split, seed=seed, on_progress=advance)
                    )
        finally:
            # What was measured is shown, whatever happens to the rest.
            if reports:
                _show(console, joined(reports), as_json=as_json)
        if out is not None:
            report = joined(reports)
            command = _command(model, tasks if task else [], chosen, n, seed, split)
            out.write_text(as_markdown(report, command))
            console.print(f"[dim]written to {out}[/]")


def _show(console: Console, report: LanguageReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.as_object(), indent=2))
        return
    for table in as_tables(report):
        console.print(table)


@contextmanager
def _bars(console: Console, views: list[View], tasks: list[str], n: int) -> Iterator[Callable[[str], None]]:
    """A progress bar for each view, and how to move them on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {name: progress.add_task(f"{name} prompts", total=n * len(tasks)) for name in views}
        if "ordinary" in views and SAMPLED in tasks:
            bars["vote"] = progress.add_task(f"{SAMPLED} sampled", total=n * SAMPLES)
        yield lambda name: progress.advance(bars[name])


def _command(model: str, tasks: list[str], views: list[View], n: int, seed: int, split: Split) -> str:
    """The command that measures the same again."""
    words = ["choreo eval language", f"--n {n}", f"--seed {seed}", f"--split {split}"]
    words += [f"--model {model}"] if model != "embedded" else []
    words += [f"--task {name}" for name in tasks]
    return " ".join([*words, f"--views {','.join(views)}"])
