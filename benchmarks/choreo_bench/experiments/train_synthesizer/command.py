"""`choreo train synthesizer`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import InvalidRequestError
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS, SynthesisLayout
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, typed_command
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesizer import train_synthesizer
from choreo_bench.showing.training import TrainingDisplay
from choreo_bench.synthesizers.curriculum import DrawnCurriculum
from choreo_bench.synthesizers.examples import WEIGHTS
from choreo_bench.synthesizers.own_merges import OwnCurriculum, read_merges

RUNS = Path("runs")
EPOCHS, EXAMPLES = 16, 2048
QUICK_EPOCHS, QUICK_EXAMPLES, QUICK_JUDGED = 3, 256, 4
EMBEDDED_RATE, USUAL_RATE = 3e-3, 2e-4
"""Learning rates of the adapter, unless told otherwise; the mapper's is a third higher."""
USUAL_SOURCES = ",".join(f"{name}={share:g}" for name, share in WEIGHTS.items())


@takes_loading
def synthesizer(
    model: ModelOption = "embedded",
    quick: Annotated[bool, typer.Option("--quick", help="A minute or two: few examples, side by side only.")] = False,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Where branches stand, in equal shares: [b]parallel[/b], [b]sequential[/b], [b]native[/b] (where "
            "their workers encoded them).  [default: parallel,sequential]",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Of the adapter; 0: none.")] = 32,
    mapper_rank: Annotated[
        int | None, typer.Option(min=0, help="Of the cache mapper; 0: none.  [default: a few per mille of the model]")
    ] = None,
    alpha: Annotated[float, typer.Option(help="The adapter adds alpha / rank times its product.")] = 32.0,
    dropout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Of the adapter's inputs.  [default: 0, of merges of your own 0.05]",
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help=f"[default: {USUAL_RATE:g}; embedded: {EMBEDDED_RATE:g}]", show_default=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help=f"[default: {EPOCHS}]", show_default=False)] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help=f"Of each epoch, all new.  [default: {EXAMPLES}]", show_default=False)
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", help="Merges of your own instead, a JSON object on each line; see the docs."),
    ] = None,
    sources: Annotated[
        str | None,
        typer.Option(
            help="Shares of dialogue cut into branches, of synthesis tasks, and of the text twin's answers.  "
            f"[default: {USUAL_SOURCES}]",
            show_default=False,
        ),
    ] = None,
    boundaries: Annotated[
        bool,
        typer.Option(help="Let the synthesizer read a boundary behind each branch: what a next turn would start with."),
    ] = True,
    imitation: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the loss that compares with the text twin's distributions."),
    ] = 0.5,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Encoded in one step.")] = 2048,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better score before it stops.")] = 8,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Development problems of each task and layout.  [default: 8]")
    ] = None,
    checkpointed: Annotated[
        bool, typer.Option("--checkpointed", help="Compute layers again instead of keeping them: slower, less memory.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of examples, weights, order and dropout.")] = 0,
    run: Annotated[Path | None, typer.Option("--run", help="Where checkpoints are kept.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where adapter and mapper go; by default below the run.")
    ] = None,
    loading: Loading = USUAL,
) -> None:
    """Teach a model to merge branches from their caches: an adapter for the synthesizer, a mapper for what it reads.

    Three kinds of examples (Parallel-Synthesis): dialogue cut into branches, synthesis tasks, and answers of the same
    model over the branches' words. Workers stay as they are. Started again with the same --run, it goes on.

    [b]Examples[/b]

      choreo train synthesizer --quick
      choreo train synthesizer --layouts parallel --out my-merger
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        if inputs is not None and (sources is not None or examples is not None):
            raise InvalidRequestError(
                "--sources and --examples are of what is drawn: with --inputs every epoch has all merges but the last"
            )
        usual_layouts = "parallel" if quick else "parallel,sequential"
        chosen = require_layouts(usual_layouts if layouts is None else layouts)
        folder = run or RUNS / f"synthesizer-{'-'.join(chosen)}-{'quick-' if quick else ''}{seed}"
        drawn = DrawnCurriculum(
            layouts=chosen,
            weights=_shares(USUAL_SOURCES if sources is None else sources),
            examples=examples or (QUICK_EXAMPLES if quick else EXAMPLES),
            judged=held_out or (QUICK_JUDGED if quick else 8),
            seed=seed,
        )
        loaded = load(console, model, loading)
        if inputs is None and not loaded.speaks_embedded:
            raise InvalidRequestError(
                f"{model!r} does not speak the embedded language, which examples are drawn in: give merges of your own "
                "with --inputs (docs/how-to/train-adapters.md)"
            )
        own = None if inputs is None else read_merges(inputs, loaded, chosen, held_out or 64, taught=imitation > 0)
        curriculum = drawn if own is None else OwnCurriculum(own, chosen, seed)
        usual = EMBEDDED_RATE if loaded.speaks_embedded else USUAL_RATE
        rate = usual if learning_rate is None else learning_rate
        settings = TuneSettings(
            rank=rank, mapper_rank=mapper_rank, alpha=alpha, boundaries=boundaries,
            dropout=dropout if dropout is not None else 0.0 if own is None else 0.05, learning_rate=rate,
            mapper_learning_rate=4 * rate / 3, final_rate=0.0, epochs=epochs or (QUICK_EPOCHS if quick else EPOCHS),
            batch_tokens=batch_tokens, patience=patience, imitation=imitation, checkpointed=checkpointed, seed=seed,
        )  # fmt: skip
        target = out or folder / "synthesizer"
        target.mkdir(parents=True, exist_ok=True)  # an error now rather than after the training
        with TrainingDisplay(console) as display:
            trained = train_synthesizer(
                loaded, settings, curriculum, run=folder, out=target, on_progress=display.training,
                on_score=display.scored, command=typed_command(),
            )  # fmt: skip
        first, best = trained.untrained.score, trained.best.score
        parts = ", ".join(name for name, there in (("adapter", rank), ("mapper", mapper_rank != 0)) if there)
        gained = f"development problems solved {100 * first:.1f} % -> [b]{100 * best:.1f} %[/]"
        if own is not None:
            gained = f"held-out loss {-first:.3f} -> [b]{-best:.3f}[/]"
        console.print(
            f"{gained}, best after epoch {trained.outcome.best_epoch}\n"
            f"[dim]{parts} and card are in {escape(str(trained.out))}: "
            f"engine.load_adapter({str(trained.out)!r}), Synthesizer(..., adapter={trained.out.name!r})[/]"
        )


def require_layouts(names: str) -> tuple[SynthesisLayout, ...]:
    """Layouts by name, each once."""
    given = list(dict.fromkeys(name.strip() for name in names.split(",")))
    chosen = tuple(layout for name in given for layout in SYNTHESIS_LAYOUTS if layout == name)
    unknown = [name for name in given if name not in SYNTHESIS_LAYOUTS]
    if unknown or not chosen:
        raise InvalidRequestError(f"there is no layout {unknown[0]!r}: there are {', '.join(SYNTHESIS_LAYOUTS)}")
    return chosen


def _shares(text: str) -> dict[str, float]:
    """`dialogue=1,tasks=2` as numbers."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = -1.0
        if name not in WEIGHTS or not 0 <= shares[name] < math.inf:
            raise InvalidRequestError(f"--sources {part!r}: write shares of {', '.join(WEIGHTS)}, as in tasks=0.5")
    if not sum(shares.values()):
        raise InvalidRequestError("--sources: some share must be above 0")
    return shares
