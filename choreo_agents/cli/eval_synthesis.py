"""`choreo eval synthesis`: answers about branches, from caches and from words, task by task."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Annotated, Self

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from choreo_agents.bench.merging.contenders import CONTENDERS, Contender, Kind
from choreo_agents.bench.merging.measure import Asked, Referee
from choreo_agents.bench.merging.plot import save_sweeps
from choreo_agents.bench.merging.report import (
    Scores,
    ablation_lines,
    order_lines,
    sweep_lines,
    verdict_lines,
    verdicts,
)
from choreo_agents.bench.merging.sweeps import SWEPT, by_branches, by_length, by_order
from choreo_agents.cli.options import DeviceOption, ModelOption, errors_as_lines, load, require_writable
from choreo_agents.errors import InvalidRequestError
from choreo_agents.language.synthesis import SYNTHESIS_TASKS
from choreo_agents.training.tuning import Passage


def synthesis(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems of each task.")] = 500,
    swept: Annotated[
        int | None, typer.Option("--swept", min=0, help="Of each task in the sweeps; 0: no sweeps.  [default: n / 5]")
    ] = None,
    contenders: Annotated[
        str | None, typer.Option(help="Only these, with commas between: text, untrained, full, ...  [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first problem, and of trainings.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="A folder for adapters and results; started again, it goes on there.")
    ] = Path("runs/merging"),
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweeps into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    device: DeviceOption = "cpu",
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
        loaded = load(console, model, device)
        if not loaded.speaks_embedded:
            raise InvalidRequestError(f"{model!r} does not speak the embedded language, which the tasks are in")
        require_writable(report)
        usual = [Asked(name, task) for name, task in SYNTHESIS_TASKS.items()]
        fewer = n // 5 if swept is None else swept
        kinds: set[Kind] = {contender.kind for contender in chosen}
        sweepers = [contender for contender in SWEPT if contender in chosen] if fewer else []
        sweeps = {"branches": by_branches(), "length": by_length(), "order": by_order()} if sweepers else {}
        with Referee(loaded, out, seed=seed) as referee, _Display(console) as display:
            referee.prepare(kinds, display.training, display.judged, shlex.join(["choreo", *sys.argv[1:]]))
            tasks = [one.task for one in usual]
            scores: dict[tuple[str, str], list[float]] = {}
            try:
                display.start("tasks", chosen, len(usual) * n)
                scores = referee.play(chosen, usual, n, display.played, tasks)
                swept_scores: dict[tuple[str, str], list[float]] = {}
                for title, asked in sweeps.items():
                    every = [one for each in asked.values() for one in each]
                    display.start(title, sweepers, len(every) * fewer)
                    swept_scores |= referee.play(sweepers, every, fewer, display.played, tasks)
            finally:
                display.stop()
        names = {
            title: {key: [one.name for one in each] for key, each in asked.items()} for title, asked in sweeps.items()
        }
        if as_json:
            typer.echo(json.dumps({f"{who} | {what}": mean(each) for (who, what), each in scores.items()}, indent=2))
        else:
            console.print(_table(scores, chosen))
        command = _command(model, n, fewer, contenders, seed)
        text = _markdown(scores, swept_scores, chosen, names, command, loaded.adapter.fingerprint)
        if report is not None:
            report.write_text(text)
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if plot is not None and sweepers:
            save_sweeps(swept_scores, names, plot)
            console.print(f"[dim]drawn to {escape(str(plot))}[/]")


def _chosen(names: str | None) -> list[Contender]:
    if names is None:
        return list(CONTENDERS)
    kinds = {contender.kind for contender in CONTENDERS}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in kinds]
    if unknown:
        raise InvalidRequestError(f"there is no contender {unknown[0]!r}: there are {', '.join(sorted(kinds))}")
    return [contender for contender in CONTENDERS if contender.kind in wanted]


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
    names: Mapping[str, Mapping[int, Sequence[str]]],
    command: str,
    weights: str,
) -> str:
    text = [f"`{command}`", "", f"Weights: `{weights[:16]}`. Solved, %; in brackets 95 % intervals.", ""]
    text += ["## What each part is worth", "", *ablation_lines(scores, contenders), ""]
    if verdicts(scores):
        text += ["## Against text, problem by problem", "", *verdict_lines(scores), ""]
    titles = {"branches": "By the number of branches", "length": "By the length of branches"}
    for key, title in titles.items():
        if key in names:
            text += [f"## {title}", "", *sweep_lines(swept, key, names[key]), ""]
    if "order" in names:
        text += ["## By the order of branches", "", *order_lines(swept, names["order"]), ""]
    return "\n".join(text)


class _Display:
    """Bars for trainings and contenders; development scores as lines above them."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._progress.stop()

    def start(self, title: str, contenders: Sequence[Contender], total: int) -> None:
        """A bar for each contender."""
        for name, bar in self._bars.items():
            self._progress.update(bar, visible=False, description=name)
        self._bars = {one.name: self._progress.add_task(f"{title}: {one.name}", total=total) for one in contenders}

    def played(self, name: str, done: int) -> None:
        self._progress.advance(self._bars[name], done)

    def training(self, kind: Kind, passage: Passage) -> None:
        if kind not in self._bars:
            self._bars[kind] = self._progress.add_task(f"training {kind}", total=passage.epochs)
        share = passage.batch / passage.batches if passage.batches else 0.0
        self._progress.update(self._bars[kind], completed=passage.epoch + share)

    def judged(self, kind: Kind, epoch: int, shares: Mapping[str, float]) -> None:
        when = "untrained" if not epoch else f"epoch {epoch}"
        self._progress.console.print(f"[dim]{kind}, {when}:[/] {mean(shares.values()):.3f}")
