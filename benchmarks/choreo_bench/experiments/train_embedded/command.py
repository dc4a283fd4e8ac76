"""`choreo train`: weights from nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from choreo_agents.errors import TrainingError
from choreo_agents.terminal.loading import DeviceOption
from choreo_agents.terminal.options import errors_as_lines
from choreo_agents.training.checkpoints import Checkpoints
from choreo_bench.embedded.card import save_model, score_model, write_card
from choreo_bench.embedded.pretrain import Pretraining
from choreo_bench.embedded.progress import BucketProgress
from choreo_bench.embedded.recipe import QUICK, TrainingRecipe
from choreo_bench.evaluation import Evaluation
from choreo_bench.experiments.eval_language.measure import NOT_SCORED
from choreo_bench.language import TASKS, Task
from choreo_bench.language.tasks import Recall

RUNS = Path("runs")
QUICK_TASK = Recall(documents=1, facts=4, questions=1, unknown=0.0, name="recall_of_4")
QUICK_BAR = 0.75
"""Share of right answers that a quick run must reach; naming one of the four facts at random reaches 0.25."""


def embedded(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes: a smaller model that only learns to recall facts.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where weights, tokenizer and card go; by default below the run.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Where checkpoints are kept, to resume from.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of weights and problems.")] = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That share each step, a core each; by default two if there are so many. The weights are the same.",
        ),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the kernels first: a third faster on long runs. By default unless [b]--quick[/b]. A resumed "
            "run without it ends with the very weights of one never stopped.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Test problems of each task for the card.")] = 500,
    device: DeviceOption = "cpu",
) -> None:
    """Train the embedded model from nothing: about 75 minutes on two CPU cores.

    Started again after it was stopped, it goes on where its last checkpoint stands, at most a minute before.

    [b]Examples[/b]

      choreo train embedded --quick
      choreo train embedded --out my-weights
      choreo eval language --model my-weights
    """
    console = Console(highlight=False)
    recipe = TrainingRecipe(seed=seed) if not quick else QUICK.with_seed(seed)
    folder = run or RUNS / f"embedded-{'quick-' if quick else ''}{seed}"
    weights = out or folder / "weights"
    with errors_as_lines(console):
        torch.set_num_threads(1)
        training = Pretraining(recipe, device=device, compiled=not quick if compiled is None else compiled)
        with _Display(console, every=10 if quick else 50) as display:
            training.run(Checkpoints(folder), display, processes=processes or _cores(device))
        save_model(training, weights)
        tasks: list[Task] = [task for name, task in TASKS.items() if name not in NOT_SCORED]
        with console.status("scoring ..."):
            evaluation = score_model(weights, [QUICK_TASK] if quick else tasks, n)
        card = write_card(training, weights, evaluation)
        console.print(_accuracies(evaluation))
        console.print(f"{training.tokens / 1e6:.1f} M tokens in {training.seconds / 60:.1f} minutes; see {card}")
        if quick:
            _require_learnt(evaluation)


def _cores(device: str) -> int:
    return (os.cpu_count() or 1) if device == "cpu" else 1


class _Display:
    """A progress bar, and accuracies as lines above it."""

    def __init__(self, console: Console, every: int) -> None:
        self._every = every
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("training")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, progress: BucketProgress) -> None:
        """Another bucket is done."""
        rate = progress.tokens / progress.seconds / 1e3
        self._progress.update(
            self._bar,
            total=progress.buckets,
            completed=progress.bucket,
            description=f"loss {progress.loss:.3f}, {rate:.1f} k tokens/s",
        )

    def wants_scores(self, bucket: int) -> bool:
        """Whether to measure accuracy now."""
        return bucket % self._every == 0

    def scores(self, bucket: int, shares: Mapping[str, float]) -> None:
        """Development accuracy by task."""
        words = ", ".join(f"{name.replace('_', ' ')} {share:.2f}" for name, share in shares.items())
        self._progress.console.print(f"[dim]bucket {bucket}:[/] {words}")


def _accuracies(evaluation: Evaluation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="test split, ordinary prompts", title_justify="left")
    for column in ("task", "right", "95 % interval"):
        table.add_column(column)
    for name, result in evaluation.results.items():
        low, high = result.solved.interval()
        table.add_row(name.replace("_", " "), f"{result.solved.share:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def _require_learnt(evaluation: Evaluation) -> None:
    share = evaluation.results[QUICK_TASK.name].solved.share
    if share < QUICK_BAR:
        raise TrainingError(
            f"{share:.0%} of the answers are right, less than {QUICK_BAR:.0%}: the run learnt next to nothing "
            "(25 % are right by chance)"
        )
