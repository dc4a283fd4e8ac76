"""`choreo train distill WORKFLOW`, for every workflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.terminal.case_options import InputsOption, MakeOptions, MaxTokensOption, PromptsOption, command_of
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, typed_command
from choreo_agents.training.settings import TuneSettings
from choreo_agents.workflows.case import Case
from choreo_agents.workflows.playing import make_setup, read_items
from choreo_bench.cases import CASES
from choreo_bench.distilling.teaching import Amounts, Taught, teach
from choreo_bench.distilling.traces import Lesson, divided
from choreo_bench.showing.training import TrainingDisplay

EMBEDDED_RATE, USUAL_RATE = 5e-3, 2e-4
"""Learning rates, unless told otherwise: a very small model takes far more."""
QUICK_TRACES, QUICK_EPOCHS, QUICK_HELD_OUT = 100, 5, 32
QUICK_IMITATION = 0.7
"""A distribution says more than the word that was drawn from it."""
RUNS = Path("runs")

_default = TuneSettings()


@takes_loading
def distill_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    variant: Annotated[
        str | None, typer.Option(help="How the workflow is served from the cache, where there are several ways.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A minute or two: fewer traces, and imitation; unless you say otherwise."),
    ] = False,
    traces: Annotated[
        int | None, typer.Option(min=1, help="To learn from.  [default: 400]", show_default=False)
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out traces, and items to play, that judge.  [default: 64]", show_default=False),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the traces.  [default: 16]", show_default=False)
    ] = None,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better score before it stops.")] = 6,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = _default.rank,
    alpha: Annotated[float, typer.Option(help="The adapter adds alpha / rank times its product.")] = _default.alpha,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Of the adapter's inputs.")] = _default.dropout,
    learning_rate: Annotated[
        float | None,
        typer.Option(help=f"[default: {USUAL_RATE:g}; embedded: {EMBEDDED_RATE:g}]", show_default=False),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Encoded in one step.")] = 1024,
    imitation: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            show_default=False,
            help=f"Share of the loss that compares with the model's own distributions over the same words as text.  "
            f"[default: 0; quick: {QUICK_IMITATION:g}]",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the traces.")] = 1.0,
    max_tokens: MaxTokensOption = None,
    checkpointed: Annotated[
        bool, typer.Option("--checkpointed", help="Compute layers again instead of keeping them: slower, less memory.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of items, weights, order and dropout.")] = 0,
    inputs: InputsOption = None,
    prompts: PromptsOption = None,
    run: Annotated[Path | None, typer.Option("--run", help="Where traces and checkpoints are kept.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the adapter goes; by default below the run.")] = None,
    loading: Loading = USUAL,
) -> None:
    console = Console(highlight=False)
    with errors_as_lines(console):
        options = make_options()
        name = usual_variant(case) if variant is None else variant
        folder = run or RUNS / f"distill-{case.name}-{name.replace(' ', '-')}-{'quick-' if quick else ''}{seed}"
        loaded = load(console, model, loading)
        # What is played to judge it is played as it will be scored.
        setup = make_setup(case, options, loaded, prompts, 0.7, 0.95, max_tokens)
        usual = EMBEDDED_RATE if loaded.speaks_embedded else USUAL_RATE
        settings = TuneSettings(
            rank=rank, alpha=alpha, dropout=dropout, batch_tokens=batch_tokens, patience=patience,
            learning_rate=usual if learning_rate is None else learning_rate,
            imitation=(QUICK_IMITATION if quick else 0.0) if imitation is None else imitation,
            epochs=epochs or (QUICK_EPOCHS if quick else 16), checkpointed=checkpointed, seed=seed,
        )  # fmt: skip
        amounts = Amounts(
            traces or (QUICK_TRACES if quick else 400), held_out or (QUICK_HELD_OUT if quick else 64), temperature, seed
        )
        own = None if inputs is None else divided(read_items(case, inputs), amounts.held_out)
        lesson = Lesson(setup, name, own=own)
        lesson.served  # noqa: B018 - a variant that does not exist is said before anything is done
        target = out or folder / "adapter"
        target.mkdir(parents=True, exist_ok=True)  # an error now rather than after the training
        with TrainingDisplay(console) as display:
            taught = teach(
                loaded, lesson, settings, amounts, run=folder, out=target, watcher=display, command=typed_command()
            )
        console.print(_ending(case, taught))


def usual_variant(case: Case) -> str:
    """The variant that is distilled unless another is named: the one that loses most, where there are several."""
    cached = [name for name, variant in case.variants.items() if variant.method == "choreo"]
    return "parallel" if "parallel" in cached else cached[0]


def _ending(case: Case, taught: Taught) -> str:
    first, best = taught.untuned, taught.outcome.best
    assert best is not None
    shares = f"{case.scored} {100 * first.score:.1f} % -> [b]{100 * best.score:.1f} %[/], "
    score = shares if taught.graded else ""
    loss = f"held-out loss {first.loss:.3f} -> [b]{best.loss:.3f}[/]"
    where = escape(str(taught.out))
    return (
        f"{score}{loss}{_of_text(taught)}, best after epoch {taught.outcome.best_epoch}\n"
        f"[dim]adapter and card are in {where}: Engine.load(..., adapter={str(taught.out)!r})[/]"
    )


def _of_text(taught: Taught) -> str:
    """What re-encoded text would reach, and how much of the way there is made."""
    if taught.as_text is None:
        return ""
    share = "" if taught.regained is None else f", [b]{100 * taught.regained:.0f} %[/] of the way"
    return f" (re-encoded as text: {taught.as_text:.3f}{share})"


def distill_doc(case: Case) -> str:
    """What `--help` says of a workflow."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nSamples ordinary runs of the workflow (baseline, temperature 1), forces their words on "
        "choreographed views of one KV cache, and trains a LoRA adapter to expect them there (Prompt Choreography, "
        "section 3.2). Started again with the same --run, it goes on where it stopped.\n\n"
        f"[b]Examples[/b]\n\n  choreo train distill {spelled} --quick\n"
        f"  choreo train distill {spelled} --traces 500 --out my-adapter"
    )


def distill_workflow(name: str) -> Callable[..., None]:
    """The command that distills a workflow."""
    return command_of(CASES[name], distill_case, distill_doc(CASES[name]))
