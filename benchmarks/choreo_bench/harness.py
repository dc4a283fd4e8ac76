"""Shared parts of all commands: options, checks of output files, progress, and reports as tables, Markdown and JSON.

It imports neither torch nor LangGraph: `choreo --help` imports the commands, and those import what they need when they
are called.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from choreo_agents.terminal.options import command_console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from choreo_agents.models import LoadedModel
    from choreo_agents.training.tuning import EvalScore, TrainingProgress
    from choreo_agents.workflows.playing import PlayProgress
    from choreo_bench.language import Split

ReportOption = Annotated[Path | None, typer.Option("--report", help="Also write the tables to this Markdown file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Also draw the figures to this PNG file.")]
JournalOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write each result to this JSONL file at once; a second run continues it."),
]
CountOption = Annotated[int, typer.Option("--n", min=1, help="Problems of each task, or items of each workflow.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**62, help="Seed of the first problem; others follow.")]
SplitOption = Annotated[
    Literal["train", "dev", "test"],
    typer.Option("--split", help="Split of problems; the embedded model was trained on [b]train[/b]."),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]


def typed_command() -> str:
    """Write down what was typed, which does the same again."""
    return shlex.join(["choreo", *sys.argv[1:]])


def require_writable(path: Path | None) -> None:
    """Raise an `OSError` now rather than after the measurement."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass


def numbers(text: str) -> list[int]:
    """Read lengths with commas between; raises `ValueError`."""
    try:
        lengths = [int(number) for number in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ValueError(f"lengths must be numbers of 1 or more, separated by commas, not {text!r}")
    return lengths


@dataclass(frozen=True)
class Table:
    """Cells under their columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    words: int = 1
    """Columns from the left that hold words; the others hold numbers."""
    left_out: Collection[str] = ()
    """Columns that a terminal has no room for."""

    def as_markdown(self) -> str:
        rule = ["---" if place < self.words else "--:" for place in range(len(self.columns))]
        head, *rows = (f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows))
        return "\n".join([head, f"|{'|'.join(rule)}|", *rows])

    def for_terminal(self) -> RichTable:
        shown = [place for place, column in enumerate(self.columns) if column not in self.left_out]
        table = RichTable(box=box.SIMPLE_HEAD, title=Text(self.title), title_justify="left")
        for place in shown:
            words = place < self.words
            table.add_column(Text(self.columns[place]), justify="left" if words else "right", no_wrap=words)
        for row in self.rows:
            table.add_row(*(Text(row[place].replace("**", "")) for place in shown))
        return table


@dataclass(frozen=True)
class Report:
    """Figures of a run, as a person and as a program reads them."""

    tables: Sequence[Table]
    object: Any
    """Plain JSON."""
    head: str = ""
    """On what was measured, and how: stands in Markdown."""
    lines: Sequence[str] = ()
    """Stand behind the tables: bars that were met or missed, notes."""

    def as_markdown(self, command: str) -> str:
        """Write all down.

        Args:
            command: Measures the same again.
        """
        parts = [f"`{command}`", self.head]
        for table in self.tables:
            parts += [f"## {table.title}" if table.title else "", table.as_markdown()]
        return "\n\n".join(filter(None, [*parts, "\n".join(f"- {line}" for line in self.lines)])) + "\n"


@dataclass(frozen=True)
class Output:
    """Output of a command: progress and results."""

    console: Console
    """Is stderr where stdout gets JSON."""
    as_json: bool
    report: Path | None
    plot: Path | None

    def write(self, report: Report) -> None:
        """Write the Markdown file, if one is wanted."""
        if self.report is not None:
            self.report.write_text(report.as_markdown(typed_command()))

    def finish(self, report: Report, draw: Callable[[], Figure] | None = None) -> None:
        """Show what was found, and write it to the files that are wanted."""
        if self.as_json:
            typer.echo(json.dumps(report.object, indent=2))
        else:
            for table in report.tables:
                self.console.print(table.for_terminal())
            for line in report.lines:
                self.console.print(line, markup=False, soft_wrap=True)
        self.write(report)
        if self.plot is not None and draw is not None:
            figure = draw()
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(self.plot, dpi=120)
        for path in (self.report, self.plot):
            if path is not None:
                self.say(f"[dim]written to {escape(str(path))}[/]")

    def say(self, line: str) -> None:
        """Print a line of rich's markup."""
        self.console.print(line, soft_wrap=True)


@contextmanager
def output(as_json: bool = False, report: Path | None = None, plot: Path | None = None) -> Iterator[Output]:
    """Open a command's output: files that cannot be written are an error now; expected errors are one line."""
    with command_console(as_json=as_json) as console:
        require_writable(report)
        require_writable(plot)
        yield Output(console, as_json, report, plot)


def require_embedded(model: LoadedModel) -> None:
    """Raise `ValueError` if a model does not speak the language that problems are drawn in."""
    if not model.has_embedded_vocabulary:
        raise ValueError(
            f"{model.name!r} was not trained on the embedded language, in which problems are generated: score it with "
            "choreo eval WORKFLOW --inputs, train it with choreo train distill"
        )


class Display:
    """Bars by name, made when they are first moved; they go when it ends, lines above them stay."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._name = ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def named(self, name: str) -> Display:
        """Let this name, of a training say, stand before all that is told from now on."""
        self._name = f"{name}, " if name else ""
        return self

    def cleared(self) -> Display:
        """Remove the bars that are there."""
        for bar in self._bars.values():
            self._progress.remove_task(bar)
        self._bars.clear()
        return self

    def playing(self, name: str, done: float, wanted: float, text: str = "") -> None:
        """Move a bar to what is done."""
        self._progress.update(self._bar(name, wanted), completed=done, said=text or f"{done:.0f}/{wanted:.0f}")

    def played(self, name: str, more: int, wanted: int) -> None:
        """Move a bar by what was done."""
        bar = self._bar(name, wanted)
        done = next(task.completed for task in self._progress.tasks if task.id == bar)
        self.playing(name, done + more, wanted)

    def plays(self, so_far: PlayProgress, wanted: int) -> None:
        """Move a variant's bar to the items that are over, and say how fast they are played."""
        rate = f"{so_far.tokens / so_far.seconds:,.0f} tokens/s" if so_far.seconds else ""
        self.playing(so_far.variant, so_far.finished, wanted, f"{so_far.finished}/{wanted} {rate}")

    def sampling(self, split: Split, done: int, wanted: int) -> None:
        """Count traces that are there."""
        self.playing(f"{split} traces", done, wanted)

    def left_out(self, split: Split, item: str, reason: str) -> None:
        """Name an item that cannot be taught."""
        self._say(f"{split} item {escape(repr(item))} is skipped:[/] {escape(reason)}")

    def training(self, passage: TrainingProgress) -> None:
        """Count epochs, and say how fast the run is."""
        share = passage.batch / passage.batches if passage.batches else 0.0
        rate = passage.tokens / passage.seconds / 1e3 if passage.seconds else 0.0
        text = f"loss {passage.loss:.3f}, {rate:.1f} k tokens/s, held out {passage.score:.3f}"
        self.playing("training", passage.epoch + share, passage.epochs, text)

    def judged(self, epoch: int, held: EvalScore) -> None:
        """Print a held-out score."""
        loss = "" if held.loss is None else f", loss {held.loss:.3f}"
        self._say(f"{_when(epoch)}:[/] held out {held.score:.3f}{loss}")

    def scored(self, epoch: int, shares: Mapping[str, float]) -> None:
        """Print development scores, whose names are a layout's and a task's."""
        by_layout: dict[str, dict[str, float]] = defaultdict(dict)
        for name, share in shares.items():
            layout, _, task = name.partition(" ")
            by_layout[layout][task] = share
        for layout, tasks in by_layout.items():
            self.shares(f"{_when(epoch)}, {layout}", tasks)

    def shares(self, when: str, shares: Mapping[str, float]) -> None:
        """Print scores by task, and their mean."""
        words = ", ".join(f"{task.replace('_', ' ')} {share:.2f}" for task, share in shares.items())
        self._say(f"{when}:[/] {mean(shares.values()):.3f}  [dim]({words})[/]")

    def _say(self, line: str) -> None:
        self._progress.console.print(f"[dim]{self._name}{line}")

    def _bar(self, name: str, total: float) -> TaskID:
        name = f"{self._name}{name}"
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, said="")
        return self._bars[name]


def _when(epoch: int) -> str:
    return f"epoch {epoch}" if epoch else "untrained"
