"""`choreo eval synthesis`: answers about branches, from caches and from words, task by task."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable, typed_command
from choreo_bench.experiments.eval_synthesis.contenders import CONTENDERS, Contender
from choreo_bench.experiments.eval_synthesis.measure import AskedTask, Referee
from choreo_bench.experiments.eval_synthesis.plot import save_sweeps
from choreo_bench.experiments.eval_synthesis.report import (
    Scores,
    ablation_lines,
    order_lines,
    sweep_lines,
    verdict_lines,
    verdicts,
)
from choreo_bench.experiments.eval_synthesis.sweeps import SWEPT, by_branches, by_length, by_order
from choreo_bench.language.synthesis import SYNTHESIS_TASKS
from choreo_bench.showing.plots import require_plots
from choreo_bench.showing.training import TrainingDisplay


@takes_loading
def synthesis(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems of each task.")] = 500,
    swept: Annotated[
        int | None, typer.Option("--swept", min=0, help="Of each task in the sweeps; 0: no sweeps.  [default: n / 5]")
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(help="Only these, with commas between: text, full, no mapper:sequential, ...  [default: all]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the first problem, and of trainings.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="A folder for adapters and results; started again, it goes on there.")
    ] = Path("runs/merging"),
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweeps into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """Merge branches on eleven tasks: what re-anchoring, cache mapper and adapter are each worth (Parallel-Synthesis).

    [b]text[/b]: the branches' words, re-encoded. [b]untrained[/b]: their caches as they are. [b]calibrated[/b]: with a
    temperature, as retrieval systems have it. [b]full[/b]: mapper and adapter. [b]no mapper[/b], [b]no adapter[/b]: one
    of them only. [b]native[/b]: both, but branches stay where their workers encoded them.

    Trains what is missing first ([b]choreo train synthesizer[/b]). Takes hours on one core; started again, it goes on.

    [b]Examples[/b]

      choreo eval synthesis --n 50 --contenders text,untrained
      choreo eval synthesis --out runs/merging --report synthesis.md --plot synthesis.png
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        chosen = _chosen(contenders)
        fewer = n // 5 if swept is None else swept
        sweepers = [contender for contender in SWEPT if contender in chosen] if fewer else []
        if plot is not None:
            require_plots()
            if not sweepers:
                raise InvalidRequestError("--plot draws the sweeps, and none is asked for: give --swept or more --n")
        loaded = load(console, model, loading)
        if not loaded.speaks_embedded:
            raise InvalidRequestError(f"{model!r} does not speak the embedded language, which the tasks are in")
        require_writable(report)
        require_writable(plot)
        usual = [AskedTask(name, task) for name, task in SYNTHESIS_TASKS.items()]
        sweeps: dict[str, Mapping[Any, Sequence[AskedTask]]] = {}
        if sweepers:
            sweeps = {"branches": by_branches(), "length": by_length(), "order": by_order()}
        with Referee(loaded, out, seed=seed) as referee, TrainingDisplay(console) as display:
            referee.prepare(
                chosen,
                lambda name, passage: display.named(name).training(passage),
                lambda name, epoch, shares: display.named(name).scored(epoch, shares),
                typed_command(),
            )
            tasks = [one.task for one in usual]

            def play(title: str, players: Sequence[Contender], asked: Sequence[AskedTask], count: int) -> Scores:
                display.named(title).cleared()
                wanted = len(asked) * count
                return referee.play(players, asked, count, lambda who, more: display.played(who, more, wanted), tasks)

            scores = play("tasks", chosen, usual, n)
            swept_scores: dict[tuple[str, str], Sequence[float]] = {}
            for title, asked in sweeps.items():
                swept_scores |= play(title, sweepers, [one for each in asked.values() for one in each], fewer)
            layout = referee.best_layout([one for one in chosen if one.kind == "full"])
        names = {
            title: {key: [one.name for one in each] for key, each in asked.items()} for title, asked in sweeps.items()
        }
        if as_json:
            typer.echo(json.dumps(_as_object(scores, swept_scores, names), indent=2))
        else:
            console.print(_table(scores, chosen))
        command = _command(model, n, fewer, contenders, seed)
        text = _markdown(scores, swept_scores, chosen, names, command, loaded.adapter, layout)
        if report is not None:
            report.write_text(text)
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if plot is not None:
            save_sweeps(swept_scores, names, plot)
            console.print(f"[dim]drawn to {escape(str(plot))}[/]")


def _chosen(names: str | None) -> list[Contender]:
    """Contenders by kind, all layouts of it, or as `kind:layout`."""
    if names is None:
        return list(CONTENDERS)
    wanted = {name.strip() for name in names.split(",")}
    known = {contender.kind for contender in CONTENDERS} | {f"{one.kind}:{one.layout}" for one in CONTENDERS}
    unknown = sorted(wanted - known)
    if unknown:
        kinds = ", ".join(sorted({contender.kind for contender in CONTENDERS}))
        raise InvalidRequestError(
            f"there is no contender {unknown[0]!r}: there are {kinds}, each also with one layout, as in full:parallel"
        )
    return [one for one in CONTENDERS if wanted & {one.kind, f"{one.kind}:{one.layout}"}]


def _as_object(scores: Scores, swept: Scores, names: Mapping[str, Mapping[int | str, Sequence[str]]]) -> dict[str, Any]:
    """Mean shares by contender and task, those of the sweeps by their titles."""
    asked = {title: {name for each in sweep.values() for name in each} for title, sweep in names.items()}
    sweeps = {title: _means({key: each for key, each in swept.items() if key[1] in of}) for title, of in asked.items()}
    return {**_means(scores), "sweeps": sweeps}


def _means(scores: Scores) -> dict[str, float]:
    return {f"{who} | {what}": mean(each) for (who, what), each in scores.items()}


def _command(model: str, n: int, swept: int, contenders: str | None, seed: int) -> str:
    words = ["choreo eval synthesis", f"--n {n}", f"--swept {swept}", f"--seed {seed}"]
    words += [f"--contenders {shlex.quote(contenders)}"] if contenders else []
    return " ".join([*words, *([f"--model {shlex.quote(model)}"] if model != "embedded" else [])])


def _table(scores: Scores, contenders: Sequence[Contender]) -> Table:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in ablation_lines(scores, contenders)]
    table = Table(box=box.SIMPLE_HEAD, title="solved, %; in brackets 95 % intervals", title_justify="left")
    for index, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if index else "left")
    for line in lines[2:]:
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table


def _markdown(
    scores: Scores,
    swept: Scores,
    contenders: Sequence[Contender],
    names: Mapping[str, Mapping[int | str, Sequence[str]]],
    command: str,
    model: ModelAdapter,
    layout: SynthesisLayout | None,
) -> str:
    text = [f"`{command}`", "", f"Weights: `{model.fingerprint[:16]}`. Solved, %; in brackets 95 % intervals.", ""]
    text += ["## What each part is worth", "", *ablation_lines(scores, contenders), ""]
    if verdicts(scores):
        text += ["## Against text, problem by problem", ""]
        if layout is not None:
            text += [
                "In bold the layout whose training solved more development problems, over all tasks.",
                "",
            ]
        text += [*verdict_lines(scores, layout), ""]
    titles = {"branches": "By the number of branches", "length": "By the length of branches"}
    for key, title in titles.items():
        if key in names:
            text += [f"## {title}", "", *sweep_lines(swept, key, names[key]), ""]
    if "order" in names:
        text += ["## By the order of branches", "", *order_lines(swept, names["order"]), ""]
    return "\n".join(text)
