"""`choreo run WORKFLOW`, for every workflow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import InvalidRequestError
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
from choreo_agents.terminal.options import ModelOption, bar, errors_as_lines
from choreo_agents.terminal.waiting import importing
from choreo_agents.workflows.case import Case, Item
from choreo_agents.workflows.cases import problem

if TYPE_CHECKING:
    from choreo_agents.engine import Engine
    from choreo_agents.training.journal import Journal
    from choreo_agents.workflows.many import PlayProgress
    from choreo_agents.workflows.playing import Setup


@takes_loading
def run_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="How it is served; [b]choreo eval[/b] compares them.")] = "choreo",
    seed: Annotated[
        int, typer.Option(max=2**32 - 1, help="Chooses one of twenty tasks, and draws what is sampled.")
    ] = 0,
    inputs: InputsOption = None,
    out: OutOption = None,
    prompts: PromptsOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    shown = inputs is not None and (out is None or as_json)
    console = Console(stderr=as_json or shown, highlight=False)
    with importing(console):
        from choreo_agents.cli.run.message_display import PlayDisplay, ending, opening
        from choreo_agents.engine import Engine, Memory
        from choreo_agents.training.journal import Journal
        from choreo_agents.workflows.playing import make_setup, play, read_items, require_variants

    with errors_as_lines(console):
        variant, *more = require_variants(case, method)
        if more:
            raise InvalidRequestError(f"--method takes one of {', '.join(case.variants)}: choreo eval compares several")
        if inputs is None and out is not None:
            raise InvalidRequestError("--out keeps the results of many items: give a file of them with --inputs")
        items = [] if inputs is None else read_items(case, inputs)
        options = make_options()
        loaded = load(console, model, loading)
        made = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens)
        setup = made.changed(case.variants[variant])
        served, memory = case.variants[variant].method, Memory(kv_budget_bytes=int(kv_gib * (1 << 30)))
        with Engine.load(loaded, method=served, memory=memory) as engine:
            if items:
                with Journal(out, made.as_settings(loaded) | {"seed": seed}) as journal:
                    _play_all(console, engine, setup, variant, items, seed, journal, shown=shown)
                return
            item = problem(case.name, seed)
            console.print(opening(case, item, model, variant))
            with PlayDisplay(console) as display:
                result, spoken, cost = asyncio.run(play(engine, setup, item, seed=seed, on_token=display.add))
        console.print(ending(case, result, cost))
        if as_json:
            told = {"item": item.model_dump(), "result": asdict(result), "messages": spoken, "cost": asdict(cost)}
            typer.echo(json.dumps(told, indent=2))


def _play_all(
    console: Console,
    engine: Engine,
    setup: Setup,
    variant: str,
    items: Sequence[Item],
    seed: int,
    journal: Journal,
    *,
    shown: bool,
) -> None:
    """Play a file of items under a bar; results that are shown are lines of JSON, in the order of the items."""
    from choreo_agents.workflows.many import content_of, play_items, require_known, seeds_of

    contents = [content_of(item) for item in items]
    require_known(journal, variant, items, contents)
    try:
        with bar(console) as progress:
            task = progress.add_task(variant, total=len(items))

            def advance(so_far: PlayProgress) -> None:
                progress.update(task, completed=so_far.finished)

            seeds = seeds_of(items, seed)
            asyncio.run(play_items(engine, setup, variant, items, contents, seeds, journal, advance))
    finally:
        keys = [f"{variant} | {item.id}" for item in items]
        records = [journal.records[key] for key in keys if key in journal]
        if shown:
            for record in records:
                typer.echo(json.dumps(record, ensure_ascii=False))
    scores = [record["score"] for record in records if record["score"] is not None]
    worth = f"{setup.case.scored}: {mean(scores):.1%} of {len(scores)}" if scores else "nothing to judge them by"
    where = "" if journal.path is None else f"; results are in {escape(str(journal.path))}"
    console.print(f"{len(items)} items, {worth}{where}")
    if failed := [record for record in records if "error" in record]:
        console.print(f"[red]{len(failed)} could not be played[/]; the first: ", end="")
        console.print(f"{failed[0]['item']}: {failed[0]['error']}", markup=False)
    if len(failed) == len(items):
        raise typer.Exit(1)


def run_doc(case: Case) -> str:
    """What `--help` says of a workflow."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nThe task is one of twenty in the embedded model's language, and shown as it is worked on. "
        "With --inputs every line of a file is worked on, many at a time; each result is a line of JSON, in --out or "
        "else on stdout.\n\n"
        f"Methods: {', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo run {spelled} --seed 7\n"
        f"  choreo run {spelled} --model path/or/hub-name --inputs items.jsonl --out results.jsonl"
    )


def run_workflow(case: Case) -> Callable[..., None]:
    """The command that runs a workflow."""
    return command_of(case, run_case, run_doc(case))
