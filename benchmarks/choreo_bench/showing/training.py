"""A training on the terminal: what it samples, learns and plays as bars, scores as lines above them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import mean
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from choreo_agents.training.tuning import Held, Passage
from choreo_bench.language import Split


class TrainingDisplay:
    """Bars by name; they go when it ends, lines stay."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._name = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def named(self, name: str) -> Self:
        """The same, for the training of this name: it stands before all that is told from now on."""
        self._name = f"{name}, " if name else ""
        return self

    def cleared(self) -> Self:
        """The same without the bars that are there."""
        for bar in self._bars.values():
            self._progress.remove_task(bar)
        self._bars.clear()
        return self

    def sampling(self, split: Split, done: int, wanted: int) -> None:
        """Traces that are there."""
        self.playing(f"{split} traces", done, wanted)

    def left_out(self, split: Split, item: str, reason: str) -> None:
        """An item that cannot be taught."""
        self._say(f"[dim]{self._name}{split} item {escape(repr(item))} is left out:[/] {escape(reason)}")

    def training(self, passage: Passage) -> None:
        """Epochs that are over, and how fast this process is."""
        share = passage.batch / passage.batches if passage.batches else 0.0
        rate = passage.tokens / passage.seconds / 1e3 if passage.seconds else 0.0
        score = "" if passage.score is None else f", held out {passage.score:.3f}"
        said = f"loss {passage.loss:.3f}, {rate:.1f} k tokens/s{score}"
        self._progress.update(self._bar("training", passage.epochs), completed=passage.epoch + share, said=said)

    def playing(self, name: str, done: int, wanted: int) -> None:
        """Items that are over."""
        self._progress.update(self._bar(name, wanted), completed=done, said=f"{done}/{wanted}")

    def played(self, name: str, more: int, wanted: int) -> None:
        """So many more items that are over."""
        bar = self._bar(name, wanted)
        self._progress.advance(bar, more)
        done = next(task.completed for task in self._progress.tasks if task.id == bar)
        self._progress.update(bar, said=f"{done:.0f}/{wanted}")

    def judged(self, epoch: int, held: Held) -> None:
        """A held-out score."""
        loss = "" if held.loss is None else f", loss {held.loss:.3f}"
        self._say(f"[dim]{self._name}{_when(epoch)}:[/] held out {held.score:.3f}{loss}")

    def scored(self, epoch: int, shares: Mapping[str, float]) -> None:
        """Development scores, whose names are a layout's and a task's."""
        by_layout: dict[str, dict[str, float]] = defaultdict(dict)
        for name, share in shares.items():
            layout, _, task = name.partition(" ")
            by_layout[layout][task] = share
        for layout, tasks in by_layout.items():
            words = ", ".join(f"{task} {share:.2f}" for task, share in tasks.items())
            head = f"[dim]{self._name}{_when(epoch)}, {layout}:[/]"
            self._say(f"{head} {mean(tasks.values()):.3f}  [dim]({words})[/]")

    def _say(self, line: str) -> None:
        self._progress.console.print(line)

    def _bar(self, name: str, total: int) -> TaskID:
        name = f"{self._name}{name}"
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, said="")
        return self._bars[name]


def _when(epoch: int) -> str:
    return f"epoch {epoch}" if epoch else "untrained"
