"""`choreo eval WORKFLOW`, for every workflow."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from choreo_agents.terminal.case_options import (
    BudgetOption,
    InputsOption,
    JsonOption,
    MakeOptions,
    MaxTokensOption,
    OutOption,
    PromptsOption,
    TemperatureOption,
    TopPOption,
    command_of,
)
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines, require_writable
from choreo_agents.training.journal import Journal
from choreo_agents.workflows.case import Case
from choreo_agents.workflows.many import PlayProgress, seeds_of
from choreo_agents.workflows.playing import make_setup, read_items, require_variants
from choreo_bench.cases import CASES
from choreo_bench.experiments.eval_workflow.report import as_markdown, as_table
from choreo_bench.language import Split
from choreo_bench.playing.many_items import draw_items, play_all
from choreo_bench.playing.outcome import PlayReport


@takes_loading
def eval_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Items drawn from the embedded language.")] = 500,
    method: Annotated[str, typer.Option(help="Any of this workflow's, with commas between.")] = "choreo,baseline,naive",
    seed: Annotated[int, typer.Option(max=2**62, help="Of the first item; the others follow.")] = 0,
    split: Annotated[Split, typer.Option(help="Which items; the embedded model was trained on [b]train[/b].")] = "test",
    inputs: InputsOption = None,
    out: OutOption = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    prompts: PromptsOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        variants = require_variants(case, method)
        require_writable(report)
        items = None if inputs is None else read_items(case, inputs)
        options = make_options()
        loaded = load(console, model, loading)
        made = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens)
        chosen = list(items) if items is not None else draw_items(case, options, n, split, seed)
        with Journal(out, made.as_settings(loaded) | {"seed": seed}) as journal:
            with _bars(console, variants, len(chosen)) as advance:
                play_all(
                    loaded,
                    made,
                    chosen,
                    variants,
                    journal,
                    seeds=range(seed, seed + n) if items is None else seeds_of(items, seed),
                    kv_budget_bytes=int(kv_gib * (1 << 30)),
                    on_progress=advance,
                )
            records = list(journal.records.values())
        found = PlayReport(records, variants, [item.id for item in chosen])
        if as_json:
            outcomes = [asdict(each) for each in found.outcomes()]
            typer.echo(json.dumps({"outcomes": outcomes, "results": records}, indent=2))
        else:
            console.print(as_table(case, found))
        if out is not None:
            console.print(f"[dim]results are in {escape(str(out))}[/]")
        asked = {item.id for item in chosen}
        failed = [r for r in records if "error" in r and r["variant"] in variants and r["item"] in asked]
        if failed:
            console.print(
                f"[red]{len(failed)} could not be played: wrong, if it is known what is right[/]; the first: ", end=""
            )
            console.print(f"{failed[0]['item']}: {failed[0]['error']}", markup=False)
        if report is not None:
            report.write_text(as_markdown(case, found, made, loaded.name, split if items is None else None, seed))
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if len(failed) == len(chosen) * len(variants):
            raise typer.Exit(1)


@contextmanager
def _bars(console: Console, variants: Sequence[str], total: int) -> Any:
    """A bar for each variant, with live throughput."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {name: progress.add_task(name, total=total, rate="") for name in variants}

        def advance(so_far: PlayProgress) -> None:
            rate = f"{so_far.tokens / so_far.seconds:,.0f} tokens/s" if so_far.seconds else ""
            progress.update(bars[so_far.variant], completed=so_far.finished, rate=rate)

        yield advance


def eval_doc(case: Case) -> str:
    """What `--help` says of a workflow."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nPlays many items under several methods, the same items and seeds for each, and says how "
        f"many are {case.scored}. Killed and started again with the same --out, it finishes the rest.\n\n"
        f"Methods: {', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo eval {spelled} --n 100\n"
        f"  choreo eval {spelled} --method choreo,baseline --out results.jsonl --report {spelled}.md"
    )


def eval_workflow(name: str) -> Callable[..., None]:
    """The command that scores a workflow."""
    return command_of(CASES[name], eval_case, eval_doc(CASES[name]))
