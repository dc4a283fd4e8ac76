"""`choreo eval pml`: questions about documents that are modules of a schema, and the same as ordinary prompts."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, bar, errors_as_lines, require_writable
from choreo_agents.training.journal import Journal
from choreo_bench.experiments.eval_pml.measure import Exam, ways
from choreo_bench.experiments.eval_pml.report import DocumentReport, as_markdown
from choreo_bench.experiments.eval_pml.tasks import require_document_tasks
from choreo_bench.language import Split


@takes_loading
def pml(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems of each task.")] = 500,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be repeated.")] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            help="A folder that [b]choreo train synthesizer[/b] has written: a third column, answered with it."
        ),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which problems; the model was trained on [b]train[/b].")] = "test",
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the first problem; the others follow.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every answer to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """What encoding documents apart costs: fourteen kinds of questions about several documents (Prompt Cache, table 1).

    [b]baseline[/b]: rules, documents and question are one ordinary prompt, in which everything attends to all before
    it. [b]cached[/b]: each document is a module of a schema, encoded without the others; the question is encoded with
    the prompt. The same tokens stand in the same places. [b]cached, adapter[/b]: with an adapter for question and
    answer, and its cache mapper, if it has one, for the documents.

    [b]Examples[/b]

      choreo eval pml --n 50
      choreo eval pml --out answers.jsonl --report pml.md --adapter runs/merging/full-sequential/synthesizer
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        tasks, columns = require_document_tasks(task or []), ways(adapter)
        loaded = load(console, model, loading)
        if not loaded.speaks_embedded:
            raise InvalidRequestError(f"{model!r} does not speak the embedded language, which the tasks are in")
        require_writable(report)
        exam = Exam(loaded, tasks, n, seed, split)
        with Journal(out, exam.settings()) as journal, bar(console) as progress:
            bars = {way.name: progress.add_task(way.name, total=n * len(tasks)) for way in columns}
            advances = {name: partial(progress.advance, each) for name, each in bars.items()}
            found = DocumentReport({way.name: exam.take(way, journal, advances[way.name]) for way in columns})
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
        else:
            console.print(_table(found))
            console.print("[dim]* the answer follows from what stands before the documents: they need not be read[/]")
        if report is not None:
            command = _command(model, n, task or [], adapter, split, seed)
            report.write_text(as_markdown(found, command, loaded.adapter.fingerprint))
            console.print(f"[dim]written to {escape(str(report))}[/]")


def _command(model: str, n: int, tasks: list[str], adapter: Path | None, split: Split, seed: int) -> str:
    """The command that measures the same again."""
    words = [f"choreo eval pml --n {n} --seed {seed} --split {split}", *(f"--task {name}" for name in tasks)]
    words += [f"--model {shlex.quote(model)}"] if model != "embedded" else []
    words += [f"--adapter {shlex.quote(str(adapter))}"] if adapter is not None else []
    return " ".join(words)


def _table(found: DocumentReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="solved, %; in brackets 95 % intervals", title_justify="left")
    for number, column in enumerate(found.columns()):
        table.add_column(column, justify="right" if number else "left")
    for row in found.rows():
        table.add_row(*row)
    return table
