"""`choreo eval tuned`: the paper's tables of quality on the embedded language, before and after distillation."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import InvalidRequestError
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable, typed_command
from choreo_agents.workflows.many import PlayProgress
from choreo_bench.experiments.eval_tuned.measure import COURSES, measure_tuned
from choreo_bench.experiments.eval_tuned.report import as_markdown, as_object, dilemma_lines
from choreo_bench.experiments.eval_untuned.report import TABLES, untuned_table
from choreo_bench.showing.training import TrainingDisplay


@takes_loading
def tuned(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Items of each workflow.")] = 500,
    workflows: Annotated[
        str | None,
        typer.Option(help="Only these, with commas between: multi_qa, prisoners_dilemma, ...  [default: all]"),
    ] = None,
    seed: Annotated[int, typer.Option(max=2**62, help="Of the first item; the others follow.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="A folder for adapters and results; started again, it goes on there.")
    ] = Path("runs/tuned"),
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """All workflows before and after distillation: tables 1 to 4 of Prompt Choreography.

    Distils each of them first ([b]choreo train distill[/b]), from at most 500 traces. Takes about two hours on one
    core; killed and started again, it goes on.

    [b]Examples[/b]

      choreo eval tuned --n 100
      choreo eval tuned --workflows multi_qa,prisoners_dilemma
      choreo eval tuned --out runs/tuned --report tuned.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        only = _only(workflows)
        loaded = load(console, model, loading)
        if not loaded.speaks_embedded:
            raise InvalidRequestError(f"{model!r} does not speak the embedded language: use choreo train distill")
        require_writable(report)
        with TrainingDisplay(console) as display:

            def advance(name: str, so_far: PlayProgress) -> None:
                display.named("").playing(f"{name}, {so_far.variant}", so_far.finished, n)

            found = measure_tuned(
                loaded,
                count=n,
                folder=out,
                seed=seed,
                only=only,
                watcher=display.named,
                on_progress=advance,
                command=typed_command(),
            )
        chosen = "" if workflows is None else f" --workflows {shlex.quote(workflows)}"
        command = f"choreo eval tuned --n {n} --seed {seed}{chosen} --out {shlex.quote(str(out))}"
        if as_json:
            typer.echo(json.dumps(as_object(found), indent=2))
        else:
            for table in TABLES:
                if any(found.played.lines(table)):
                    console.print(untuned_table(found.played, table))
            if found.dilemma is not None:
                console.print("\n".join(dilemma_lines(found.dilemma)), markup=False)
        if report is not None:
            report.write_text(as_markdown(found, command, loaded.adapter.fingerprint))
            console.print(f"[dim]written to {escape(str(report))}[/]")


def _only(names: str | None) -> frozenset[str] | None:
    if names is None:
        return None
    known = {course.case for course in COURSES.values()}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"there is no workflow {unknown[0]!r} in the tables: there are {', '.join(sorted(known))}"
        )
    return frozenset(wanted)
