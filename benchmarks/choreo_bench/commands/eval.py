"""`choreo eval`: answers under several methods, with intervals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from choreo_agents.terminal.case_options import (
    BudgetOption,
    InputsOption,
    MakeOptions,
    MaxTokensOption,
    PromptsOption,
    TemperatureOption,
    TopPOption,
    command_of,
)
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption
from choreo_agents.workflows.cases import Case, read_items
from choreo_bench.harness import (
    CountOption,
    Display,
    JournalOption,
    PlotOption,
    Report,
    ReportOption,
    SeedOption,
    SplitOption,
    output,
    require_embedded,
    typed_command,
)

TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only this task; repeatable.")]


@takes_loading
def language(
    model: ModelOption = "embedded",
    n: CountOption = 500,
    task: TaskOption = None,
    views: Annotated[
        str,
        typer.Option(
            "--views",
            help="Views, separated by commas. [b]ordinary[/b]: one text prompt. [b]serial[/b]: cached messages in "
            "sequence, each encoded on its own. [b]parallel[/b]: cached messages that have not seen each other "
            "start at one offset.",
        ),
    ] = "ordinary",
    split: SplitOption = "test",
    seed: SeedOption = 0,
    report: ReportOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Score how well a model speaks the embedded language: accuracy by task, with 95 % intervals.

    Temperature 0, but for arithmetic, where one sample at temperature 0.7 is compared with the vote over eight.

    [b]Examples[/b]

      choreo eval language --n 100
      choreo eval language --task two_questions --views ordinary,serial,parallel
      choreo eval language --json > language.json
    """
    with output(as_json, report) as out:
        from choreo_bench.experiments.eval_language import SAMPLES, measure, require_tasks, require_views

        chosen, tasks = require_views(views.split(",")), require_tasks(task or [])
        loaded = load(out.console, model, loading)
        totals = dict.fromkeys(chosen, n * len(tasks)) | {"vote": n * SAMPLES}
        with Display(out.console) as display:
            result = measure(
                loaded,
                tasks=tasks,
                views=chosen,
                count=n,
                split=split,
                seed=seed,
                on_progress=lambda name: display.played(name, 1, totals[name]),
            )
        out.finish(result.report())


@takes_loading
def eval_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    n: CountOption = 500,
    method: Annotated[str, typer.Option(help="Variants, separated by commas.")] = "choreo,baseline,naive",
    seed: SeedOption = 0,
    split: SplitOption = "test",
    inputs: InputsOption = None,
    journal: JournalOption = None,
    report: ReportOption = None,
    prompts: PromptsOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    adapter: Annotated[Path | None, typer.Option(help="A folder: each method is played with its adapter, too.")] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    with output(as_json, report) as out:
        from dataclasses import asdict

        from choreo_agents.training.journal import Journal
        from choreo_agents.workflows.playing import make_setup, require_variants, seeds_of
        from choreo_bench.playing import TUNED_SUFFIX, PlayReport, draw_items, play_all

        variants = require_variants(case, method)
        variants += [] if adapter is None else [name + TUNED_SUFFIX for name in variants]
        items = None if inputs is None else read_items(case, inputs)
        options, loaded = make_options(), load(out.console, model, loading)
        made = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens)
        chosen = list(items) if items is not None else draw_items(case, options, n, split, seed)
        with (
            Journal(journal, made.as_settings(loaded) | {"seed": seed}) as known,
            Display(out.console) as display,
        ):
            play_all(
                loaded,
                made,
                chosen,
                variants,
                known,
                seeds=range(seed, seed + n) if items is None else seeds_of(items, seed),
                kv_budget_bytes=int(kv_gib * (1 << 30)),
                on_progress=lambda so_far: display.plays(so_far, len(chosen)),
                adapter=adapter,
            )
            records = list(known.records.values())
        ids = {item.id for item in chosen}
        failed = [r for r in records if "error" in r and r["variant"] in variants and r["item"] in ids]
        lines = []
        if failed:
            first = f"{failed[0]['item']}: {failed[0]['error']}"
            lines = [f"{len(failed)} failed, and count as wrong where the right answer is known; the first: {first}"]
        played = PlayReport(records, variants, [item.id for item in chosen])
        title = f"{case.name.replace('_', ' ')}: {case.scored}, %; in brackets 95 % intervals"
        results = {"outcomes": [asdict(outcome) for outcome in played.outcomes()], "results": records}
        out.finish(Report([played.table(title, case.scored)], results, lines=lines))
        if len(failed) == len(chosen) * len(variants):
            raise typer.Exit(1)


def eval_doc(case: Case) -> str:
    """Write the help of a workflow's command."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nRuns many items under several methods, with the same items and seeds for each, and reports "
        f"how many are {case.scored}. If it is stopped, run it again with the same --out to continue.\n\nMethods: "
        f"{', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo eval {spelled} --n 100\n  choreo eval {spelled} "
        "--method choreo,baseline --report page.md"
    )


@takes_loading
def dilemma(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Games for each of Alice's strategies.")] = 500,
    seed: SeedOption = 0,
    temperature: TemperatureOption = 1.0,
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Score how often Bob cooperates, by what he sees of Alice, on the same games (table 3 and figure 8 of the paper).

    Differences to the baseline come with the 95 % interval that inverts McNemar's test.

    [b]Examples[/b]

      choreo eval dilemma --n 100
      choreo eval dilemma --report dilemma.md --plot dilemma.png
    """
    with output(as_json, report, plot) as out:
        from choreo_bench.experiments.eval_dilemma import ALICES, measure_dilemma

        loaded = load(out.console, model, loading)
        with Display(out.console) as display:
            result = measure_dilemma(
                loaded,
                games=n,
                seed=seed,
                temperature=temperature,
                on_progress=lambda name: display.played(name, 1, n * len(ALICES)),
            )
        out.finish(result.report(), result.figure)


@takes_loading
def untuned(
    model: ModelOption = "embedded",
    n: CountOption = 500,
    seed: SeedOption = 0,
    split: SplitOption = "test",
    temperature: TemperatureOption = 0.7,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results; run again with it to continue.")
    ] = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Score all workflows on the embedded language, untuned: tables 1, 2 and 4 of Prompt Choreography.

    naive is left out: it encodes what the baseline encodes, only more often. Differences to the baseline come with the
    interval that inverts McNemar's test, those of shares with a paired bootstrap.

    [b]Examples[/b]

      choreo eval untuned --n 50
      choreo eval untuned --out runs/untuned --report untuned.md
    """
    with output(as_json, report) as out:
        from choreo_agents.sampling import Sampling
        from choreo_bench.experiments.eval_untuned import measure_untuned

        loaded = load(out.console, model, loading)
        require_embedded(loaded)
        with Display(out.console) as display:
            result = measure_untuned(
                loaded,
                count=n,
                folder=folder,
                split=split,
                seed=seed,
                sampling=Sampling(temperature=temperature, top_p=0.95, max_tokens=96),
                on_progress=lambda name, so_far: display.named(name).plays(so_far, n),
            )
        head = f"Weights: `{loaded.adapter.fingerprint[:16]}`. In brackets 95 % intervals."
        out.finish(Report(list(result.tables().values()), result.as_object(), head))


@takes_loading
def tuned(
    model: ModelOption = "embedded",
    n: CountOption = 500,
    workflows: Annotated[
        str | None,
        typer.Option(help="Only these, separated by commas: multi_qa, prisoners_dilemma, ...  [default: all]"),
    ] = None,
    seed: SeedOption = 0,
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for adapters and results; run again with it to continue.")
    ] = Path("runs/tuned"),
    report: ReportOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Score all workflows before and after distillation: tables 1 to 4 of Prompt Choreography.

    Distils each of them first ([b]choreo train distill[/b]), from at most 500 traces. Takes about two hours on one
    core; killed and started again, it goes on.

    [b]Examples[/b]

      choreo eval tuned --n 100
      choreo eval tuned --workflows multi_qa,prisoners_dilemma
      choreo eval tuned --out runs/tuned --report tuned.md
    """
    with output(as_json, report) as out:
        from choreo_bench.experiments.eval_tuned import measure_tuned, workflows_named

        only = workflows_named(workflows)
        loaded = load(out.console, model, loading)
        require_embedded(loaded)
        with Display(out.console) as display:
            result = measure_tuned(
                loaded,
                count=n,
                folder=folder,
                seed=seed,
                only=only,
                watcher=display.named,
                on_progress=lambda name, so_far: display.named(name).plays(so_far, n),
                command=typed_command(),
            )
        out.finish(result.report(loaded.adapter.fingerprint))


@takes_loading
def synthesis(
    model: ModelOption = "embedded",
    n: CountOption = 500,
    swept: Annotated[
        int | None,
        typer.Option("--swept", min=0, help="Problems per task in the sweeps; 0: no sweeps.  [default: n / 5]"),
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(help="Only these, separated by commas: text, full, no mapper:sequential, ...  [default: all]"),
    ] = None,
    seed: SeedOption = 0,
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for adapters and results; run again with it to continue.")
    ] = Path("runs/merging"),
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
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
    with output(as_json, report, plot) as out:
        from choreo_agents.errors import InvalidRequestError
        from choreo_bench.experiments.eval_synthesis.measure import SWEPT, Evaluator, contenders_named, sweeps
        from choreo_bench.experiments.eval_synthesis.report import MergeReport

        chosen = contenders_named(contenders)
        fewer = n // 5 if swept is None else swept
        sweepers = [contender for contender in SWEPT if contender in chosen] if fewer else []
        if plot is not None and not sweepers:
            raise InvalidRequestError("--plot draws the sweeps, but there are none: set --swept, or raise --n")
        loaded = load(out.console, model, loading)
        require_embedded(loaded)
        swept_tasks = sweeps() if sweepers else {}
        with Evaluator(loaded, folder, seed=seed) as referee, Display(out.console) as display:
            referee.prepare(chosen, display, typed_command())
            scores, swept_scores = referee.play_all(chosen, n, sweepers, fewer, swept_tasks, display)
            layout = referee.best_layout([one for one in chosen if one.kind == "full"])
        names = {
            title: {value: [one.name for one in tasks] for value, tasks in by_value.items()}
            for title, by_value in swept_tasks.items()
        }
        result = MergeReport(loaded.adapter.fingerprint, chosen, scores, swept_scores, names, layout)
        out.finish(result.report(), result.figure)


@takes_loading
def pml(
    model: ModelOption = "embedded",
    n: CountOption = 500,
    task: TaskOption = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            help="A folder that [b]choreo train synthesizer[/b] wrote: adds a third column, answered with it."
        ),
    ] = None,
    split: SplitOption = "test",
    seed: SeedOption = 0,
    journal: JournalOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Score fourteen kinds of questions about documents that were encoded apart, and together (Prompt Cache, table 1).

    [b]baseline[/b]: rules, documents and question are one ordinary prompt, in which everything attends to all before
    it. [b]cached[/b]: each document is a module of a schema, encoded without the others; the question is encoded with
    the prompt. The same tokens stand in the same places. [b]cached, adapter[/b]: with an adapter for question and
    answer, and its cache mapper, if it has one, for the documents.

    [b]Examples[/b]

      choreo eval pml --n 50
      choreo eval pml --out answers.jsonl --report pml.md --adapter runs/merging/full-sequential/synthesizer
    """
    with output(as_json, report) as out:
        from choreo_agents.training.journal import Journal
        from choreo_bench.experiments.eval_pml.measure import Exam, ways
        from choreo_bench.experiments.eval_pml.report import DocumentReport
        from choreo_bench.experiments.eval_pml.tasks import require_document_tasks

        tasks, columns = require_document_tasks(task or []), ways(adapter)
        loaded = load(out.console, model, loading)
        require_embedded(loaded)
        exam = Exam(loaded, tasks, n, seed, split)
        with Journal(journal, exam.settings()) as known, Display(out.console) as display:
            result = DocumentReport(
                {
                    way.name: exam.take(way, known, partial(display.played, way.name, 1, n * len(tasks)))
                    for way in columns
                }
            )
        out.finish(result.report(loaded.adapter.fingerprint))


def workflows() -> dict[str, Callable[..., None]]:
    """Make a command for each workflow, by its name."""
    from choreo_bench.cases import CASES

    return {name.replace("_", "-"): command_of(case, eval_case, eval_doc(case)) for name, case in CASES.items()}
