"""`choreo run WORKFLOW`: plays one problem with a live display, or a file of items, for every bundled workflow."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from choreo_agents.cli.compare import as_object, summary, table_of
from choreo_agents.cli.displays import DISPLAYS, PlayDisplay
from choreo_agents.terminal.case_options import (
    BudgetOption,
    InputsOption,
    MakeOptions,
    MaxTokensOption,
    PromptsOption,
    TopPOption,
    command_of,
)
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, bar, command_console
from choreo_agents.workflows import cases
from choreo_agents.workflows.cases import REPORTS, Case, DebateOptions, Item, RecordDebate, RecordOptions

if TYPE_CHECKING:
    from choreo_agents.engine import Engine
    from choreo_agents.training.journal import Journal
    from choreo_agents.workflows.playing import MethodRun, PlayProgress, Setting

_TEMPERATURES = {"debate": 0.0, "tree_of_thoughts": 1.0}
"""Default temperatures for bundled problems: candidates of a tree must differ for votes to matter."""


@takes_loading
def run_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="Method to serve it; [b]choreo eval[/b] compares them.")] = "choreo",
    seed: Annotated[
        int, typer.Option(max=2**32 - 1, help="Seed of sampling, and of the choice among twenty tasks.")
    ] = 0,
    inputs: InputsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Write each result to this JSONL file at once; a second run continues it.")
    ] = None,
    prompts: PromptsOption = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature: by default 0.7; 1 in bundled trees, 0 in bundled debates."),
    ] = None,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed runs of each method in the comparison: by default 5, or 1 for other models."),
    ] = None,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Only run it, under one method.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of the run to this file; see [b]choreo inspect run[/b].")
    ] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    shown = inputs is not None and (out is None or as_json)
    with command_console(as_json=as_json or shown) as console:
        from choreo_agents.engine import Engine, Memory
        from choreo_agents.training.journal import Journal
        from choreo_agents.workflows.playing import Setting, make_setup, require_variants

        variant, *more = require_variants(case, method)
        if more:
            raise ValueError(f"--method must be one of {', '.join(case.variants)}; choreo eval compares several")
        if inputs is None and out is not None:
            raise ValueError("--out stores the results of many items: pass a file of them with --inputs")
        items = [] if inputs is None else cases.read_items(case, inputs)
        options = make_options()
        if inputs is not None and isinstance(options, RecordOptions):
            no_compare = no_compare or options.reports != REPORTS
            options = DebateOptions(agents=options.agents, rounds=options.rounds)
        if html is not None and not html.parent.is_dir():
            raise ValueError(f"--html {html}: there is no folder {str(html.parent)!r}")
        if inputs is not None and (no_compare or repeats or html):
            raise ValueError("--reports, --repeats, --no-compare and --html apply to bundled problems, not to --inputs")
        if temperature is None:
            temperature = 0.7 if inputs is not None else _TEMPERATURES.get(case.name, 0.7)
        loaded = load(console, model, loading)
        base = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens)
        item = cases.problem(case.name, seed)
        if isinstance(options, RecordOptions):
            item = cases.debate_problem(seed, agents=options.agents, reports=options.reports)
        setting = Setting(loaded, base, item, seed, Memory(kv_budget_bytes=int(kv_gib * (1 << 30))))
        if not items:
            times = 0 if no_compare else repeats or (5 if loaded.has_embedded_vocabulary else 1)
            show(console, setting, model, variant, times, html, as_json=as_json)
            return
        served = case.variants[variant]
        setting = replace(setting, setup=base.changed(served))
        with (
            Engine.load(loaded, method=served.method, memory=setting.memory) as engine,
            Journal(out, base.as_settings(loaded) | {"seed": seed}) as journal,
        ):
            _play_all(console, engine, setting, variant, items, journal, shown)


def _play_all(
    console: Console, engine: Engine, setting: Setting, variant: str, items: list[Item], journal: Journal, shown: bool
) -> None:
    """Play items with a progress bar; with `shown`, print each result as a line of JSON, in the order of the items."""
    from choreo_agents.workflows.playing import play_items, require_known, seeds_of

    require_known(journal, variant, items)
    seeds = seeds_of(items, setting.seed)
    try:
        with bar(console, variant, len(items)) as update:

            def advance(so_far: PlayProgress) -> None:
                update(completed=so_far.finished)

            asyncio.run(play_items(engine, setting.setup, variant, items, seeds, journal, advance))
    finally:
        keys = [f"{variant} | {item.id}" for item in items]
        records = [journal.records[key] for key in keys if key in journal]
        if shown:
            for record in records:
                typer.echo(json.dumps(record, ensure_ascii=False))
    scores = [record["score"] for record in records if record["score"] is not None]
    scored = setting.setup.case.scored
    worth = f"{scored}: {mean(scores):.1%} of {len(scores)}" if scores else "there are no answers to score them"
    where = "" if journal.path is None else f"; results are in {escape(str(journal.path))}"
    console.print(f"{len(items)} items, {worth}{where}")
    if failed := [record for record in records if "error" in record]:
        console.print(f"[red]{len(failed)} failed[/]; the first: ", end="")
        console.print(f"{failed[0]['item']}: {failed[0]['error']}", markup=False)
    if len(failed) == len(items):
        raise typer.Exit(1)


def run_workflow(case: Case) -> Callable[..., None]:
    """Return the command that runs a workflow."""
    if case.name == "debate":
        return command_of(RecordDebate(), run_case, RecordDebate.__doc__ or "", seed=6)
    spelled = case.name.replace("_", "-")
    doc = (
        f"{case.summary}\n\nThe task is one of twenty in the embedded model's language, and its progress is shown. "
        "With --inputs every line of a file is processed, many at a time; each result is a line of JSON, in --out or "
        f"else on stdout.\n\nMethods: {', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo run {spelled} --seed "
        f"7\n  choreo run {spelled} --model path/or/hub-name --inputs items.jsonl --out results.jsonl"
    )
    return command_of(case, run_case, doc)


def show(
    console: Console, setting: Setting, model: str, variant: str, repeats: int, html: Path | None, *, as_json: bool
) -> None:
    """Play one item with a live display; then print its costs, under all methods if `repeats`, and what to try next."""
    from choreo_agents.inspection import run_page
    from choreo_agents.workflows.playing import compared, run_method

    case = setting.setup.case
    display = DISPLAYS.get(case.name, PlayDisplay)(console, setting)
    console.print(display.opening(model, variant))
    with tempfile.TemporaryDirectory() as folder:
        record = None if html is None else Path(folder) / html.with_suffix(".jsonl").name
        with display:
            run = run_method(setting, variant, record=record, on_token=display.add, on_decode=display.add_cost)
        if html is not None and record is not None:
            run_page(record).write(html)
            console.print(f"The run, message by message: {escape(str(html))}")
    console.print(verdict(setting, run, variant))
    cost, extra = run.cost, dict[str, Any]()
    console.print(
        f"{cost.tokens_encoded:,} tokens encoded, {cost.tokens_reused:,} reused; first token "
        f"{cost.ttft_mean_s * 1e3:,.1f} ms, end to end {cost.end_to_end_s * 1e3:,.0f} ms"
    )
    if repeats:
        with bar(console, "the same answers under three methods") as update:
            comparison = compared(setting, repeats, lambda completed, total: update(completed=completed, total=total))
        extra = as_object(comparison)
        [item] = comparison.inputs
        console.print("", table_of(comparison, "the baseline's answers under three methods"), "")
        console.print(summary(comparison, case.name.split("_")[0]))
        note = f"{escape(item.differs)} is the first to answer differently" if item.differs else "all answers agree"
        console.print(f"Decoding freely from the cache and from text, {note}.")
    if as_json:
        result, messages = asdict(run.result), display.messages()
        played = {"item": setting.item.model_dump(), "result": result, "messages": messages, "cost": asdict(cost)}
        typer.echo(json.dumps(played | extra, indent=2))
        return
    for more in filter(None, (f"--seed {setting.seed + 1}", display.more, "--model PATH --inputs FILE.jsonl")):
        console.print(f"Try next: choreo run {case.name.replace('_', '-')} {more}")


def verdict(setting: Setting, run: MethodRun, method: str) -> Text:
    """Return the final answer and its score as one line."""
    result, right = run.result, getattr(setting.item, "answer", None)
    parts = "".join(f", {name} {share:.0%}" for name, share in result.parts.items() if not name.startswith("first"))
    mark = ("", "")
    if result.score is not None:
        style = "bold green" if result.score >= 1 else "bold red" if result.score <= 0 else "bold yellow"
        worth = f"{setting.setup.case.scored}: {result.score:.0%}"
        mark = (f"  {worth if right is None else 'right' if result.score else f'wrong: {right}'}", style)
    answer = result.answer.removeprefix(setting.setup.prompts.texts.get("lead", "")).strip()
    return Text.assemble(f"final answer ({method}): ", (answer, "bold"), mark, (parts, "dim"))
