"""`choreo train`: weights, adapters and cache mappers; a training that is started again goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from choreo_agents.terminal.case_options import InputsOption, MakeOptions, MaxTokensOption, PromptsOption, command_of
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption
from choreo_agents.workflows.cases import Case, read_items
from choreo_bench.harness import Display, SeedOption, output, typed_command

if TYPE_CHECKING:
    from choreo_bench.embedded.pretrain import BucketProgress

RUNS = Path("runs")
ScratchOption = Annotated[Path | None, typer.Option("--run", help="Folder for checkpoints, to resume from.")]
TrainedOption = Annotated[Path | None, typer.Option("--out", help="Folder for the result; by default below --run.")]
EpochsOption = Annotated[int | None, typer.Option("--epochs", min=1, help="Passes over the examples.  [default: 16]")]
PatienceOption = Annotated[
    int, typer.Option("--patience", min=1, help="Epochs without a better score before it stops.")
]
AlphaOption = Annotated[float, typer.Option("--alpha", help="The adapter adds alpha / rank times its product.")]
DropoutOption = Annotated[float | None, typer.Option("--dropout", min=0.0, max=0.99, help="Share of dropped inputs.")]
BatchOption = Annotated[int, typer.Option("--batch-tokens", min=1, help="Most tokens in one step.")]
RateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="Default 2e-4; for the embedded model 25 or 15 times as much.")
]
CheckpointedOption = Annotated[
    bool, typer.Option("--checkpointed", help="Compute layers again instead of keeping them: slower, less memory.")
]
ImitationOption = Annotated[
    float | None,
    typer.Option(
        "--imitation",
        min=0.0,
        max=1.0,
        help="Share of the loss that compares with the model's own distributions over the same text.",
    ),
]


def embedded(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes: a smaller model that only learns to recall facts.")
    ] = False,
    target: TrainedOption = None,
    run: ScratchOption = None,
    seed: SeedOption = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that share each step, one per core; by default up to two. The weights do not depend on it.",
        ),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the kernels first: a third faster on long runs. Default unless [b]--quick[/b]. Without it a "
            "resumed run ends with exactly the weights of an uninterrupted one.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Test problems of each task for the model card.")] = 500,
    device: Annotated[str, typer.Option(help="Where it is trained: cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Train the embedded model from nothing: about 75 minutes on two CPU cores.

    Started again after it was stopped, it goes on where its last checkpoint stands, at most a minute before.

    [b]Examples[/b]

      choreo train embedded --quick
      choreo train embedded --out my-weights
      choreo eval language --model my-weights
    """
    with output() as out:
        import os

        import torch

        from choreo_bench.embedded import card, recipe
        from choreo_bench.embedded.pretrain import Pretraining
        from choreo_bench.experiments.eval_language import NOT_SCORED
        from choreo_bench.language import TASKS

        folder = run or RUNS / f"embedded-{'quick-' if quick else ''}{seed}"
        weights = target or folder / "weights"
        torch.set_num_threads(1)
        made = recipe.QUICK.with_seed(seed) if quick else recipe.TrainingRecipe(seed=seed)
        training = Pretraining(made, device=device, compiled=not quick if compiled is None else compiled)
        with Display(out.console) as display:

            def on_bucket(progress: BucketProgress) -> None:
                text = f"loss {progress.loss:.3f}, {progress.tokens / progress.seconds / 1e3:.1f} k tokens/s"
                display.playing("training", progress.bucket, progress.buckets, text)

            training.run(
                folder / "checkpoint.pt",
                on_bucket,
                lambda bucket, shares: display.shares(f"bucket {bucket}", shares),
                score_every=10 if quick else 50,
                processes=processes or ((os.cpu_count() or 1) if device == "cpu" else 1),
            )
        card.save_model(training, weights)
        tasks = [card.QUICK_TASK] if quick else [task for name, task in TASKS.items() if name not in NOT_SCORED]
        with out.console.status("scoring ..."):
            evaluation = card.score_model(weights, tasks, n)
        written = card.write_card(training, weights, evaluation)
        out.console.print(card.accuracy_table(evaluation).for_terminal())
        out.say(
            f"{training.tokens / 1e6:.1f} M tokens in {training.seconds / 60:.1f} minutes; see {escape(str(written))}"
        )
        if quick:
            card.require_learnt(evaluation)


@takes_loading
def synthesizer(
    model: ModelOption = "embedded",
    quick: Annotated[bool, typer.Option("--quick", help="A minute or two: few examples, side by side only.")] = False,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Layouts of branches, in equal shares: [b]parallel[/b], [b]sequential[/b], [b]native[/b] (at the "
            "positions where their workers encoded them).  [default: parallel,sequential]",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the adapter; 0: none.")] = 32,
    mapper_rank: Annotated[
        int | None, typer.Option(min=0, help="Rank of the mapper; 0: none.  [default: a few per mille of the model]")
    ] = None,
    alpha: AlphaOption = 32.0,
    dropout: DropoutOption = None,
    learning_rate: RateOption = None,
    epochs: EpochsOption = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Per epoch, all new.  [default: 2048]")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", help="Merges of your own instead, a JSON object on each line; see the docs."),
    ] = None,
    sources: Annotated[
        str | None,
        typer.Option(
            help="Shares of dialogue cut into branches, of synthesis tasks, and of the text twin's answers.  "
            "[default: dialogue=0.1,tasks=0.75,distilled=0.15]",
            show_default=False,
        ),
    ] = None,
    boundaries: Annotated[
        bool,
        typer.Option(help="Let the synthesizer read a boundary behind each branch: the opening of a next turn."),
    ] = True,
    imitation: ImitationOption = 0.5,
    batch_tokens: BatchOption = 2048,
    patience: PatienceOption = 8,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Development problems of each task and layout.  [default: 8]")
    ] = None,
    checkpointed: CheckpointedOption = False,
    seed: SeedOption = 0,
    run: ScratchOption = None,
    target: TrainedOption = None,
    loading: Loading = USUAL,
) -> None:
    """Teach a model to merge branches from their caches: an adapter for the synthesizer, a mapper for what it reads.

    Three kinds of examples (Parallel-Synthesis): dialogue cut into branches, synthesis tasks, and answers of the same
    model over the branches' words. Workers stay as they are. Started again with the same --run, it goes on.

    [b]Examples[/b]

      choreo train synthesizer --quick
      choreo train synthesizer --layouts parallel --out my-merger
    """
    with output() as out:
        from choreo_agents.errors import InvalidRequestError
        from choreo_agents.training.settings import TuneSettings
        from choreo_agents.training.synthesizer import train_synthesizer
        from choreo_bench.synthesizers.curriculum import DrawnCurriculum, layouts_named, shares_in
        from choreo_bench.synthesizers.own_merges import OwnCurriculum, read_merges

        if inputs is not None and (sources is not None or examples is not None):
            raise InvalidRequestError(
                "--sources and --examples apply to generated examples only: leave them out with --inputs"
            )
        chosen = layouts_named(("parallel" if quick else "parallel,sequential") if layouts is None else layouts)
        folder = run or RUNS / f"synthesizer-{'-'.join(chosen)}-{'quick-' if quick else ''}{seed}"
        drawn = DrawnCurriculum(
            layouts=chosen,
            weights=None if sources is None else shares_in(sources),
            examples=examples or (256 if quick else 2048),
            judged=held_out or (4 if quick else 8),
            seed=seed,
        )
        loaded = load(out.console, model, loading)
        if inputs is None and not loaded.has_embedded_vocabulary:
            raise InvalidRequestError(
                f"{model!r} was not trained on the embedded language, in which examples are generated: pass merges of "
                "your own with --inputs (docs/how-to/train-adapters.md)"
            )
        imitated = 0.0 if imitation is None else imitation
        own = None if inputs is None else read_merges(inputs, loaded, chosen, held_out or 64, taught=imitated > 0)
        rate = learning_rate if learning_rate is not None else 3e-3 if loaded.has_embedded_vocabulary else 2e-4
        settings = TuneSettings(
            rank=rank, mapper_rank=mapper_rank, alpha=alpha, boundaries=boundaries,
            dropout=dropout if dropout is not None else 0.0 if own is None else 0.05, learning_rate=rate,
            mapper_learning_rate=4 * rate / 3, final_rate=0.0, epochs=epochs or (3 if quick else 16),
            batch_tokens=batch_tokens, patience=patience, imitation=imitated, checkpointed=checkpointed, seed=seed,
        )  # fmt: skip
        into = target or folder / "synthesizer"
        into.mkdir(parents=True, exist_ok=True)  # an error now rather than after the training
        with Display(out.console) as display:
            trained = train_synthesizer(
                loaded,
                settings,
                drawn if own is None else OwnCurriculum(own, chosen, seed),
                run=folder,
                out=into,
                on_progress=display.training,
                on_score=display.scored,
                command=typed_command(),
            )
        first, best = trained.untrained.score, trained.best.score
        parts = ", ".join(name for name, there in (("adapter", rank), ("mapper", mapper_rank != 0)) if there)
        gained = f"development problems solved {100 * first:.1f} % -> [b]{100 * best:.1f} %[/]"
        if own is not None:
            gained = f"held-out loss {-first:.3f} -> [b]{-best:.3f}[/]"
        out.say(
            f"{gained}, best after epoch {trained.best_epoch}\n"
            f"[dim]{parts} and card are in {escape(str(into))}: "
            f"engine.load_adapter({str(into)!r}), Synthesizer(..., adapter={into.name!r})[/]"
        )


@takes_loading
def distill_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    variant: Annotated[
        str | None, typer.Option(help="Variant of the workflow that is served from the cache, if there are several.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A minute or two: fewer traces, and imitation; other options override it."),
    ] = False,
    traces: Annotated[int | None, typer.Option(min=1, help="Traces for training.  [default: 400]")] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Held-out traces and items for evaluation.  [default: 64]")
    ] = None,
    epochs: EpochsOption = None,
    patience: PatienceOption = 6,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 64,
    alpha: AlphaOption = 32.0,
    dropout: DropoutOption = 0.05,
    learning_rate: RateOption = None,
    batch_tokens: BatchOption = 1024,
    imitation: ImitationOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature of the traces.")] = 1.0,
    max_tokens: MaxTokensOption = None,
    checkpointed: CheckpointedOption = False,
    seed: SeedOption = 0,
    inputs: InputsOption = None,
    prompts: PromptsOption = None,
    run: ScratchOption = None,
    target: TrainedOption = None,
    loading: Loading = USUAL,
) -> None:
    with output() as out:
        from choreo_agents.training.settings import TuneSettings
        from choreo_agents.workflows.playing import make_setup
        from choreo_bench.distilling.teaching import Amounts, teach
        from choreo_bench.distilling.traces import DistillConfig, divided, usual_variant

        options = make_options()
        name = usual_variant(case) if variant is None else variant
        folder = run or RUNS / f"distill-{case.name}-{name.replace(' ', '-')}-{'quick-' if quick else ''}{seed}"
        loaded = load(out.console, model, loading)
        # What is played to judge it is played as it will be scored.
        setup = make_setup(case, options, loaded, prompts, 0.7, 0.95, max_tokens)
        settings = TuneSettings(
            rank=rank, alpha=alpha, dropout=dropout or 0.0, batch_tokens=batch_tokens, patience=patience,
            learning_rate=learning_rate if learning_rate is not None else 5e-3 if loaded.has_embedded_vocabulary else
            2e-4, # A distribution says more than the word that was drawn from it.
            imitation=imitation if imitation is not None else 0.7 if quick else 0.0,
            epochs=epochs or (5 if quick else 16), checkpointed=checkpointed, seed=seed,
        )  # fmt: skip
        amounts = Amounts(traces or (100 if quick else 400), held_out or (32 if quick else 64), temperature, seed)
        own = None if inputs is None else divided(read_items(case, inputs), amounts.held_out)
        lesson = DistillConfig(setup, name, own=own)
        lesson.served  # noqa: B018 - a variant that does not exist is said before anything is done
        into = target or folder / "adapter"
        into.mkdir(parents=True, exist_ok=True)  # an error now rather than after the training
        with Display(out.console) as display:
            taught = teach(
                loaded, lesson, settings, amounts, run=folder, out=into, watcher=display, command=typed_command()
            )
        first, best = taught.outcome.untrained, taught.outcome.best
        score = f"{case.scored} {100 * first.score:.1f} % -> [b]{100 * best.score:.1f} %[/], " if taught.graded else ""
        share = "" if taught.regained is None else f", [b]{100 * taught.regained:.0f} %[/] of the way"
        text = "" if taught.as_text is None else f" (re-encoded as text: {taught.as_text:.3f}{share})"
        out.say(
            f"{score}held-out loss {first.loss:.3f} -> [b]{best.loss:.3f}[/]{text}, "
            f"best after epoch {taught.outcome.best_epoch}\n[dim]adapter and card are in {escape(str(taught.out))}: "
            f"Engine.load(..., adapter={str(taught.out)!r})[/]"
        )


def distill_doc(case: Case) -> str:
    """Write the help of a workflow's command."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nSamples ordinary runs of the workflow (baseline, temperature 1), forces their text on "
        "choreographed views of one KV cache, and trains a LoRA adapter to predict it there (Prompt Choreography, "
        "section 3.2). If it is stopped, run it again with the same --run to continue.\n\n[b]Examples[/b]\n\n  choreo "
        f"train distill {spelled} --quick\n  choreo train distill {spelled} --traces 500 --out my-adapter"
    )


def workflows() -> dict[str, Callable[..., None]]:
    """Make a command that distills each workflow, by its name."""
    from choreo_bench.cases import CASES

    return {name.replace("_", "-"): command_of(case, distill_case, distill_doc(case)) for name, case in CASES.items()}
