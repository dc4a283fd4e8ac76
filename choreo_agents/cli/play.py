"""`choreo run WORKFLOW` and `choreo eval WORKFLOW`, for every workflow."""

from __future__ import annotations

import asyncio
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

from choreo_agents.bench.outcome import PlayReport
from choreo_agents.bench.playing import Progress as PlayProgress
from choreo_agents.bench.playing import Setup, draw_items, play, play_all, read_items, seeds_of
from choreo_agents.cli.options import DeviceOption, ModelOption, errors_as_lines, load, require_writable
from choreo_agents.cli.outcome_tables import as_markdown, as_table
from choreo_agents.cli.play_display import PlayDisplay, ending, opening
from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.evaluation.journal import Journal
from choreo_agents.language import Split
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.cases import Case, Item, Options
from choreo_agents.workflows.phrasing import load_prompts

EMBEDDED_TOKENS, CHAT_TOKENS = 96, 512
"""A message's tokens at most, unless told otherwise."""

MakeOptions = Callable[[], Options]
InputsOption = Annotated[
    Path | None, typer.Option("--inputs", help="Items of your own, a JSON object on each line; see the docs.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write each result to this JSONL file as it comes; started again, it goes on there."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help="A TOML file of other texts for agents: see the docs."),
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Of all that is said.")]
TopPOption = Annotated[float, typer.Option("--top-p", min=0.01, max=1.0, help="Of all that is said.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help=f"Of a message; by default {EMBEDDED_TOKENS}, or {CHAT_TOKENS} for other models."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")]
BudgetOption = Annotated[float, typer.Option("--kv-gib", min=0.01, help="KV memory of an engine, in GiB.")]


def run_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="How it is served; [b]choreo eval[/b] compares them.")] = "choreo",
    seed: Annotated[int, typer.Option(max=2**62, help="Draws the task and what is sampled.")] = 0,
    inputs: InputsOption = None,
    out: OutOption = None,
    prompts: PromptsOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
) -> None:
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if inputs is not None or out is not None:
            items = None if inputs is None else read_items(case, inputs)
            _score(
                console, case, make_options(), [method], items, 1, seed, out, None, as_json=as_json, split="test",
                setup=(model, device, prompts, temperature, top_p, max_tokens, kv_gib),
            )  # fmt: skip
            return
        [variant] = require_variants(case, method)
        options = make_options()
        loaded = load(console, model, device)
        setup = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens).changed(
            case.variants[variant]
        )
        item = case.draw(setup.options, "test", seed)
        console.print(opening(case, item, model, variant))
        served = case.variants[variant].method
        budget = int(kv_gib * (1 << 30))
        with (
            Engine.load(loaded, method=served, memory=Memory(kv_budget_bytes=budget)) as engine,
            PlayDisplay(console) as display,
        ):
            result, spoken, cost = asyncio.run(play(engine, setup, item, seed=seed, on_token=display.add))
        console.print(ending(case, result, cost))
        if as_json:
            found = {"item": item.model_dump(), "result": asdict(result), "messages": spoken, "cost": asdict(cost)}
            typer.echo(json.dumps(found, indent=2))


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
    device: DeviceOption = "cpu",
) -> None:
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        items = None if inputs is None else read_items(case, inputs)
        _score(
            console, case, make_options(), method.split(","), items, n, seed, out, report, as_json=as_json, split=split,
            setup=(model, device, prompts, temperature, top_p, max_tokens, kv_gib),
        )  # fmt: skip


def _score(
    console: Console,
    case: Case,
    options: Options,
    methods: Sequence[str],
    items: Sequence[Item] | None,
    n: int,
    seed: int,
    out: Path | None,
    report: Path | None,
    *,
    as_json: bool,
    split: Split,
    setup: tuple[str, str, Path | None, float, float, int | None, float],
) -> None:
    """Play all items under all methods, with a bar for each, and show what they are worth."""
    model, device, prompts, temperature, top_p, max_tokens, kv_gib = setup
    variants = require_variants(case, ",".join(methods))
    require_writable(report)
    loaded = load(console, model, device)
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
                seeds=seeds_of(chosen, seed, drawn=items is None),
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


def make_setup(
    case: Case,
    options: Options,
    loaded: LoadedModel,
    prompts: Path | None,
    temperature: float,
    top_p: float,
    max_tokens: int | None,
) -> Setup:
    """What is played, with the prompts and the message length that suit the model."""
    embedded = loaded.speaks_embedded
    most = max_tokens or (EMBEDDED_TOKENS if embedded else CHAT_TOKENS)
    texts = load_prompts(case.name, "embedded" if embedded else "chat", prompts)
    return Setup(case, options, texts, Sampling(temperature=temperature, top_p=top_p, max_tokens=most))


def require_variants(case: Case, names: str) -> list[str]:
    """Variants by name, each once, in the order in which they are named."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in case.variants:
            raise InvalidRequestError(f"{case.name} has no method {name!r}: it has {', '.join(case.variants)}")
    return chosen


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
